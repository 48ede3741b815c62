"""Tasks that end together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Coroutine, Iterable
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
