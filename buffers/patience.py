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

T = TypeVar("T")


async def patiently(
    call: Callable[[], Awaitable[T]],
    *,
    limit_s: float,
    bears: type[BufferError] = BufferError,
    until: asyncio.Event | None = None,
) -> T:
    """Make a call again, after growing pauses, until the store answers; every operation of the buffer allows it.

    Raises the store's error once it has failed for `limit_s` or `until` is set, and at once what is no error that it
    `bears`, or what no repetition can heal: Fenced, UnknownMember.
    """
    began, pause = time.monotonic(), FIRST_PAUSE_S
    until = until or asyncio.Event()
    while True:
        try:
            return await call()
        except (Fenced, UnknownMember):
            raise
        except bears as error:
            if time.monotonic() - began + pause > limit_s or until.is_set():
                raise
            logger.warning("the store does not serve: %s; next try in %.1f s", error, pause)
            if await stopped(until, asyncio.sleep(pause)):
                raise
        pause = min(2 * pause, MOST_PAUSE_S)
