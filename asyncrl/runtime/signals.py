"""Running a process's main coroutine: the first SIGINT, SIGTERM or SIGHUP asks it to stop, the second ends it now."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import NoReturn

import psutil

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(main: Callable[[asyncio.Event], Awaitable[int]], *, grace_s: float, echo_s: float = 0.0) -> int:
    """Run `main(stop)` on uvloop and return its exit code; 128 + the signal's number if one asked it to stop.

    `stop` is set by the first signal; `main` then has `grace_s` seconds. After them, or at a second signal, the process
    ends on the spot, with every child it has. echo_s: others that come so soon after the first are the same one: a
    scheduler signals every process of a job, and a launcher passes on what it was sent. Call it from the main thread.
    """
    received: list[int] = []
    first_at = 0.0
    limit: list[threading.Timer] = []

    async def guarded() -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        # Plain handlers, not loop.add_signal_handler: the second signal must also end a process whose loop is blocked
        # by a long step, and so must the timer, which therefore is a thread.
        def on_signal(number: int, _frame: FrameType | None) -> None:
            nonlocal first_at
            if received and time.monotonic() - first_at < echo_s:
                return
            if received:
                end_now(received[0], f"second signal ({signal.Signals(number).name})")
            received.append(number)
            first_at = time.monotonic()
            log.info("%s: stopping within %.0f s", signal.Signals(number).name, grace_s)
            timer = threading.Timer(grace_s, end_now, (number, f"not stopped after {grace_s:.0f} s of grace"))
            timer.daemon = True
            timer.start()
            limit.append(timer)
            loop.call_soon_threadsafe(stop.set)

        # What nohup or a background shell ignores stays ignored.
        taken = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        previous = {number: signal.signal(number, on_signal) for number in taken}
        try:
            return await main(stop)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            code = runner.run(guarded())
    finally:
        for timer in limit:
            timer.cancel()
    return 128 + received[0] if received else code


def end_now(number: int, reason: str) -> NoReturn:
    """Leave without any cleaning up but this: no child survives."""
    log.warning("%s: ending now", reason)
    for child in psutil.Process().children(recursive=True):  # type: ignore[no-untyped-call]
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(128 + number)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not a dependency on Windows
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
