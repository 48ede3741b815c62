"""Tasks that end together, and calls that cannot be ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

RECANCEL_S = 0.5

T = TypeVar("T")


async def all_or_nothing(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Results in order. The first exception cancels the other calls, waits until they ended, and is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await end_all(tasks)


async def end_all(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until they ended; what they raise is of no interest any more.

    A cancellation is repeated until it takes: before Python 3.12 `asyncio.wait_for`, which the store's client uses for
    every command, swallows one that arrives at the moment its own wait is over.
    """
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=RECANCEL_S)
    await asyncio.gather(*tasks, return_exceptions=True)


async def stopped(stop: asyncio.Event, work: Coroutine[Any, Any, Any]) -> bool:
    """Run `work` to its end, or until `stop` is set; True if that came first. Raises what `work` raises."""
    running, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        return not running.done()
    finally:
        await end_all({running, stopping})


def in_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """The outcome of `call`, made in a daemon thread of its own. (`asyncio.to_thread` has a pool, for whose threads the
    loop and the interpreter wait at their end, however long.)"""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]  # without an error it is a T

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as caught:
            error = caught
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="asyncrl-call", daemon=True).start()
    return outcome
