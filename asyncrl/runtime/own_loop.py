"""Running a coroutine in somebody else's process: a script, or a notebook, whose main thread has a running event loop.

`signals` is the counterpart for processes of our own. Here no signal handler and no event loop of the caller's is
touched: the coroutine gets a loop in a thread of its own, and what the caller sees of signals is KeyboardInterrupt.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

CANCEL_S = 30.0
"""For a cancelled coroutine to kill its processes and return."""


def run(main: Callable[[asyncio.Event], Awaitable[T]], *, grace_s: float) -> T:
    """`main(stop)`, its result or its exception; returns when it has ended.

    A first KeyboardInterrupt sets `stop`; after `grace_s` seconds, or at a second one, `main` is cancelled. Either way
    KeyboardInterrupt is raised in the end. The thread lives as long as `main`, so it may tie processes to itself
    (`tether`).
    """
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, asyncio.Task[T] | None]] = Future()
    ended: Future[T] = Future()

    async def guarded() -> T:
        stop = asyncio.Event()
        begun.set_result((asyncio.get_running_loop(), stop, asyncio.current_task()))
        return await main(stop)

    def work() -> None:
        try:
            # Runner, not asyncio.run: libraries for notebooks replace that with one for the caller's loop.
            with asyncio.Runner() as runner:
                result = runner.run(guarded())
        except BaseException as error:
            ended.set_exception(error)
        else:
            ended.set_result(result)

    thread = threading.Thread(target=work, name="asyncrl.run")
    try:
        thread.start()
        return ended.result()  # no limit of its own: `main` has them
    except KeyboardInterrupt:
        # RuntimeError: the loop is closed, it has just ended. TimeoutError: its cleaning up hangs; the tether remains.
        with suppress(RuntimeError, TimeoutError):
            loop, stop, task = begun.result(CANCEL_S)
            try:
                loop.call_soon_threadsafe(stop.set)
                ended.exception(grace_s)
            except (TimeoutError, KeyboardInterrupt):
                assert task is not None
                loop.call_soon_threadsafe(task.cancel)
                ended.exception(CANCEL_S)
        raise
