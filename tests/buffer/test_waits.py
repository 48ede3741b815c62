"""Waits end when what they wait for happens, not at their limit; and their limit is kept."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from asyncrl.buffers.base import Lease, Member, Waiting
from asyncrl.staleness import Weights
from tests.buffer.acts import joins, limits, puts, serves, starts, takes, trains

LONG_S = 60.0  # a wait that ends by its limit fails the test's own, which is shorter
PATIENCE_S = 4.0  # below the 5 s after which a waiter looks again by itself: a wake-up that is missing must fail


async def _blocked(call: Any) -> asyncio.Task[Any]:
    """The call, started and seen to be still waiting."""
    task: asyncio.Task[Any] = asyncio.create_task(call)
    await asyncio.sleep(0.2)  # long enough to have asked once; if not, the wait is only tested less
    assert not task.done()
    return task


@pytest.mark.asyncio
async def test_a_learner_is_woken_by_the_put_that_completes_its_batch(make_buffer: Any) -> None:
    lims = limits(0, 2)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    first, second = await takes(buffer, a, 0)
    task = await _blocked(buffer.lease(1, 0, wait_s=LONG_S))
    await puts(buffer, a, first)
    await puts(buffer, a, second)
    lease = await asyncio.wait_for(task, PATIENCE_S)
    assert isinstance(lease, Lease)
    assert lease.ordinals == (0, 1)


@pytest.mark.asyncio
async def test_a_collector_is_woken_by_the_commit_that_frees_its_room(make_buffer: Any) -> None:
    lims = limits(1, 1)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    for ticket in await takes(buffer, a, 0):
        await puts(buffer, a, ticket)
    await trains(buffer, 1, 0)
    task = await _blocked(buffer.tickets(a, seq=1, want=5, wait_s=LONG_S))
    await serves(buffer, a, Weights(1, 1))
    assert [t.ordinal for t in await asyncio.wait_for(task, PATIENCE_S)] == [2]


@pytest.mark.asyncio
async def test_a_collector_is_woken_when_another_is_given_up(make_buffer: Any) -> None:
    lims = limits(0, 1, member_timeout_s=1.0)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    await takes(buffer, a, 0)
    b = await joins(buffer, "b", Weights(1, 0))

    async def beats() -> None:
        while True:
            await serves(buffer, b, Weights(1, 0))
            await asyncio.sleep(0.2)

    alive = asyncio.create_task(beats())
    granted = await asyncio.wait_for(buffer.tickets(b, seq=0, want=1, wait_s=LONG_S), PATIENCE_S)
    alive.cancel()
    assert [(t.ordinal, t.attempt) for t in granted] == [(0, 1)], "nothing fires by itself: its own deadline woke it"


@pytest.mark.asyncio
@pytest.mark.parametrize("event", ["announce", "finish", "verification", "evaluation"])
async def test_a_collector_is_nudged_by_what_it_must_know(make_buffer: Any, event: str) -> None:
    lims = limits(0, 1)
    buffer = await make_buffer(lims)
    lineage = await starts(buffer, lims)
    a: Member = await joins(buffer, "a", None)
    await buffer.nudge(a, 0.1)  # what the start itself had put into the mailbox
    task = await _blocked(buffer.nudge(a, LONG_S))
    if event == "announce":
        await buffer.announce(Weights(lineage, 0), {"transport": "none"})
    elif event == "finish":
        await buffer.finish()
    elif event == "verification":
        await buffer.request_verification("v1")
    else:
        await buffer.request_evaluation({"id": "eval-1-0", "weights": [1, 0]})
    await asyncio.wait_for(task, PATIENCE_S)
    beat = await serves(buffer, a, None)
    said = {
        "announce": (beat.announced, beat.announcements),
        "finish": beat.phase,
        "verification": beat.verify,
        "evaluation": beat.evaluation,
    }
    assert (
        said[event]
        == {
            "announce": (Weights(1, 0), 2),  # the first was the start's
            "finish": "ended",
            "verification": "v1",
            "evaluation": {"id": "eval-1-0", "weights": [1, 0]},
        }[event]
    )


@pytest.mark.asyncio
async def test_waits_keep_their_limit(make_buffer: Any) -> None:
    lims = limits(0, 1)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", None)
    async with asyncio.timeout(PATIENCE_S):
        start = time.monotonic()
        assert await buffer.tickets(a, seq=0, want=1, wait_s=0.3) == []
        assert isinstance(await buffer.lease(1, 0, wait_s=0.3), Waiting)
        assert await buffer.evaluation("eval-none", wait_s=0.3) is None
        assert time.monotonic() - start >= 0.8


@pytest.mark.asyncio
async def test_one_collector_evaluates_and_the_learner_gets_the_result(make_buffer: Any) -> None:
    lims = limits(0, 1)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a, b = await joins(buffer, "a", Weights(1, 0)), await joins(buffer, "b", Weights(1, 0))
    await buffer.request_evaluation({"id": "eval-1-0", "weights": [1, 0], "prompts": 2})
    assert await buffer.claim_evaluation(a, "eval-1-0")
    assert not await buffer.claim_evaluation(b, "eval-1-0")
    assert (await serves(buffer, b, Weights(1, 0))).evaluation is None
    await buffer.leave(a)  # it died before it had a result
    assert await buffer.claim_evaluation(b, "eval-1-0")
    task = await _blocked(buffer.evaluation("eval-1-0", wait_s=LONG_S))
    await buffer.report_evaluation("eval-1-0", {"id": "eval-1-0", "success": 0.25, "n": 2})
    assert (await asyncio.wait_for(task, PATIENCE_S))["success"] == 0.25
    assert (await serves(buffer, b, Weights(1, 0))).evaluation is None
