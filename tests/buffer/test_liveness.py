"""Collectors that die, are replaced or stop getting on, and tickets that take them along: who is given up, and when."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.buffers.base import Member, State, UnknownMember, Waiting
from asyncrl.staleness import Weights
from tests.buffer.acts import PAYLOAD, header, joins, limits, puts, serves, starts, takes
from tests.buffer.driver import Clock


@pytest.mark.asyncio
async def test_a_lost_collectors_ticket_does_not_block_its_own_reissue(make_buffer: Any, clock: Clock) -> None:
    lims = limits(0, 1)
    buffer = await make_buffer(lims, clock)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    assert [t.ordinal for t in await takes(buffer, a, 0)] == [0]
    await clock.passes(buffer, lims.member_timeout_s + 1)
    b = await joins(buffer, "b", Weights(1, 0))
    (again,) = await takes(buffer, b, 0)
    assert (again.ordinal, again.attempt) == (0, 1)
    with pytest.raises(UnknownMember):
        await serves(buffer, a, Weights(1, 0))
    assert await buffer.put(a, header(again), PAYLOAD) == "refused"
    assert await puts(buffer, b, again) == "held"


@pytest.mark.asyncio
async def test_a_dead_waiter_at_the_head_does_not_keep_the_others_asleep(make_buffer: Any, clock: Clock) -> None:
    lims = limits(0, 2)
    buffer = await make_buffer(lims, clock)
    await starts(buffer, lims)
    a, b, c = [await joins(buffer, name, Weights(1, 0)) for name in "abc"]
    tickets = await takes(buffer, a, 0)
    assert await takes(buffer, b, 0) == []  # b waits first
    await clock.passes(buffer, lims.member_timeout_s - 1)
    await serves(buffer, a, Weights(1, 0), progress={(0, 0): 1, (1, 0): 1})
    await serves(buffer, c, Weights(1, 0))
    assert await takes(buffer, c, 0) == []  # then c
    clock.now += 5  # b is dead by now
    await buffer.fail(a, tickets[0].ordinal, 0, kind="data", reason="bad_row", tokens=0, seconds=0.0)
    (granted,) = await takes(buffer, c, 0)
    assert granted.ordinal == 2


@pytest.mark.asyncio
async def test_a_put_over_a_successor_is_refused_and_leaves_its_group_alone(make_buffer: Any) -> None:
    lims = limits(0, 1)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    old = await joins(buffer, "a", Weights(1, 0), "first")
    (ticket,) = await takes(buffer, old, 0)
    new = await joins(buffer, "a", Weights(1, 0), "second")
    (again,) = await takes(buffer, new, 0)
    assert await puts(buffer, new, again) == "held"
    assert await buffer.put(old, header(ticket, payload=b"zombie"), b"zombie") == "refused"
    lease = await buffer.lease(1, 0, wait_s=0.0)
    assert await buffer.payloads(lease) == [PAYLOAD]
    assert (await buffer.stats()).refused_puts == 1


@pytest.mark.asyncio
async def test_a_ticket_that_takes_collectors_with_it_fails_as_poison(make_buffer: Any) -> None:
    lims = limits(0, 1, max_losses=3)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    for n in range(3):
        member = await joins(buffer, "a", Weights(1, 0), f"incarnation-{n}")
        assert [(t.ordinal, t.attempt) for t in await takes(buffer, member, 0)] == [(0, n)]
    survivor = await joins(buffer, "a", Weights(1, 0), "incarnation-3")
    assert [t.ordinal for t in await takes(buffer, survivor, 0)] == [1]
    assert (await buffer.stats()).reasons == {"failed/poison": 1}


@pytest.mark.asyncio
async def test_a_straggler_ends_after_ten_medians_and_a_stuck_ticket_is_returned(
    make_buffer: Any, clock: Clock
) -> None:
    lims = limits(4, 1, member_timeout_s=1e6, ticket_progress_s=500.0)
    buffer = await make_buffer(lims, clock)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    tickets = await takes(buffer, a, 0)
    await clock.passes(buffer, 20.0)
    await puts(buffer, a, tickets[0])  # the median is 20 s now: stragglers end at 200 s
    await clock.passes(buffer, 170.0)
    await serves(buffer, a, Weights(1, 0), progress={(t.ordinal, 0): 5 for t in tickets[1:]})
    assert (await buffer.stats()).states[State.ISSUED] == 4
    await clock.passes(buffer, 20.0)
    beat = await serves(buffer, a, Weights(1, 0), progress={(1, 0): 6})
    assert beat.revoked == ((1, 0),)
    assert (await buffer.stats()).reasons == {"stale/straggler": 4}


@pytest.mark.asyncio
async def test_without_progress_a_ticket_goes_back_although_its_collector_beats(make_buffer: Any, clock: Clock) -> None:
    lims = limits(0, 1, member_timeout_s=1e6, ticket_progress_s=50.0)
    buffer = await make_buffer(lims, clock)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    await takes(buffer, a, 0)
    for _ in range(3):
        await clock.passes(buffer, 20.0)
        beat = await serves(buffer, a, Weights(1, 0), progress={(0, 0): 7})
    await clock.passes(buffer, 20.0)
    assert beat.revoked == ()
    beat = await serves(buffer, a, Weights(1, 0), progress={(0, 0): 7})
    assert beat.revoked == ((0, 0),)


@pytest.mark.asyncio
async def test_who_is_waited_for_has_a_name(make_buffer: Any) -> None:
    lims = limits(0, 2)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    nobody = await buffer.lease(1, 0, wait_s=0.0)
    assert isinstance(nobody, Waiting)
    assert "none is connected" in nobody.reason
    a: Member = await joins(buffer, "collector-7", Weights(1, 0))
    await takes(buffer, a, 0)
    waiting = await buffer.lease(1, 0, wait_s=0.0)
    assert (waiting.for_ordinals, waiting.members) == ((0, 1), ("collector-7",))
