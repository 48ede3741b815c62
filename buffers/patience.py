"""Calls to the buffer that outlast an outage of the store."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from asyncrl.buffers.base import BufferError, Fenced, UnknownMember
from asyncrl.buffers.concurrency import stopped

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, MOST_PAUSE_S = 0.2, 5.0

HURRIED_S = 5.0
"""For who is in a hurry: a store that was killed is back within two or three."""

T = TypeVar("T")


async def patiently(
    call: Callable[[], Awaitable[T]],
    *,
    limit_s: float,
    bears: type[BufferError] = BufferError,
    hurry: asyncio.Event | None = None,
) -> T:
    """Make a call again, after growing pauses, until the store answers; every operation of the buffer allows it.

    Raises the store's error once it has failed for `limit_s`, or for HURRIED_S after `hurry` was set; at once what is
    no error that it `bears`, and what no repetition can heal: Fenced, UnknownMember.
    """
    ends, pause = time.monotonic() + limit_s, FIRST_PAUSE_S
    hurry, hurried = hurry or asyncio.Event(), False
    while True:
        try:
            return await call()
        except (Fenced, UnknownMember):
            raise
        except bears as error:
            now = time.monotonic()
            if hurry.is_set() and not hurried:
                ends, pause, hurried = min(ends, now + HURRIED_S), FIRST_PAUSE_S, True
            if now + pause > ends:
                raise
            logger.warning("the store does not serve: %s; next try in %.1f s", error, pause)
        if hurried:
            await asyncio.sleep(pause)
        else:
            await stopped(hurry, asyncio.sleep(pause))
        pause = min(2 * pause, MOST_PAUSE_S)
