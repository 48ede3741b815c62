"""Calls to the buffer that outlast an outage of the store."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from asyncrl.buffers.base import BufferError, Fenced, UnknownMember

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, MOST_PAUSE_S = 0.2, 5.0

T = TypeVar("T")


async def patiently(call: Callable[[], Awaitable[T]], *, limit_s: float) -> T:
    """Make a call again, after growing pauses, until the store answers; every operation of the buffer allows it.

    Raises the store's error once it has failed for `limit_s`, and at once what no repetition can heal: Fenced,
    UnknownMember.
    """
    began, pause = time.monotonic(), FIRST_PAUSE_S
    while True:
        try:
            return await call()
        except (Fenced, UnknownMember):
            raise
        except BufferError as error:
            if time.monotonic() - began + pause > limit_s:
                raise
            logger.warning("the store does not serve: %s; next try in %.1f s", error, pause)
        await asyncio.sleep(pause)
        pause = min(2 * pause, MOST_PAUSE_S)
