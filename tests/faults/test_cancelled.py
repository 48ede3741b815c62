"""A call that is cancelled in mid-flight, at any point, leaves the connection in step and the buffer as if it had been
made once, when it is made again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio.connection import AbstractConnection

from asyncrl.buffers.limits import Limits
from asyncrl.buffers.remote import RedisBuffer
from asyncrl.buffers.store import Store, open_store
from tests.faults.test_replies import LIMITS, outcome, undisturbed

NewRun = Callable[[Store, Limits], Awaitable[RedisBuffer]]

LIMIT_S = 60.0
TICKS = 40
"""Turns of the event loop within which a call ends or is cancelled: an answer takes about ten to twenty."""

SEEDS = 8

REPEATED_AS_ANOTHER = ("new_lineage", "create_run")
"""A start has no identity: made again it is another start."""


async def cut_short(call: Callable[[], Awaitable[Any]], ticks: int) -> tuple[bool, Any]:
    """Cancel a call after so many turns of the loop; (True, its answer) if it was done by then."""
    task = asyncio.ensure_future(call())
    for _ in range(ticks):
        await asyncio.sleep(0)
    task.cancel()
    try:
        return True, await task
    except asyncio.CancelledError:
        return False, None


class Impatient:
    """A buffer whose calls are cancelled at random points, up to five times each, before one is let through. In between
    the connection is asked something that has one answer only."""

    def __init__(self, buffer: RedisBuffer, rng: random.Random) -> None:
        self.buffer, self.rng = buffer, rng
        self.limits = buffer.limits
        self.cancelled = 0
        self.echoes = 0

    def __getattr__(self, operation: str) -> Any:
        call = getattr(self.buffer, operation)

        async def made(*args: Any, **kwargs: Any) -> Any:
            if operation not in REPEATED_AS_ANOTHER:
                for _ in range(5):
                    done, answer = await cut_short(lambda: call(*args, **kwargs), self.rng.randrange(TICKS))
                    await self.in_step()
                    if done:
                        return answer
                    self.cancelled += 1
            return await call(*args, **kwargs)

        return made

    async def in_step(self) -> None:
        self.echoes += 1
        asked = f"echo {self.echoes}".encode()
        assert await self.buffer.store.client.echo(asked) == asked, "a connection answers another question"


async def impatient_run(url: str, new_run: NewRun, seed: int) -> tuple[Any, int]:
    store = await open_store(url)
    try:
        buffer = Impatient(await new_run(store, LIMITS), random.Random(seed))
        return await outcome(buffer), buffer.cancelled  # type: ignore[arg-type]
    finally:
        await store.close()


@pytest.mark.faults
@pytest.mark.asyncio
async def test_calls_that_are_cancelled_anywhere_are_made_again_and_count_once(
    server_url: str, new_run: NewRun
) -> None:
    async with asyncio.timeout(LIMIT_S):
        reference = await undisturbed(server_url, new_run)
        for seed in range(SEEDS):
            found, cancelled = await impatient_run(server_url, new_run, seed)
            assert cancelled > 0
            assert found == reference


@pytest.mark.faults
@pytest.mark.asyncio
async def test_a_connection_that_is_kept_after_a_cancellation_answers_the_question_before(
    server_url: str, new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = AbstractConnection.read_response

    async def read_and_keep(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await read(self, *args, **kwargs | {"disconnect_on_error": False})

    monkeypatch.setattr(AbstractConnection, "read_response", read_and_keep)
    with pytest.raises(AssertionError, match="answers another question"):
        await asyncio.gather(*(impatient_run(server_url, new_run, seed) for seed in range(SEEDS)))


@pytest.mark.faults
@pytest.mark.asyncio
async def test_a_cancelled_call_may_or_may_not_have_acted(server_url: str, new_run: NewRun) -> None:
    """What the test above relies on: its cancellations fall on both sides of the server's act."""
    store = await open_store(server_url)
    acted = {True: 0, False: 0}
    async with asyncio.timeout(LIMIT_S):
        for ticks in range(2 * TICKS):
            buffer = await new_run(store, LIMITS)
            lineage = await buffer.new_lineage(parent=None, limits=LIMITS)
            done, _ = await cut_short(lambda b=buffer: b.finish(error="e"), ticks)  # type: ignore[misc]
            stats = await buffer.stats()
            assert stats.lineage == lineage
            if not done:
                acted[stats.error is not None] += 1
        await store.close()
    assert min(acted.values()) > 0, acted
