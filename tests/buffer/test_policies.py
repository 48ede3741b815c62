"""What becomes of work that is over age, by policy; and what it is accounted as."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.buffers.base import State
from asyncrl.staleness import Weights
from tests.buffer.acts import header, joins, limits, puts, serves, starts, takes, trains
from tests.buffer.driver import Clock


async def _with_an_old_ticket(buffer: Any, lims: Any) -> tuple[Any, Any]:
    """k 1, B 1, V 2: one ticket issued for version 0 is still in work; two younger ones are trained."""
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    slow, fast = await takes(buffer, a, 0)
    await puts(buffer, a, fast)
    await trains(buffer, 1, 0)
    await serves(buffer, a, Weights(1, 1), progress={(slow.ordinal, 0): 30})
    (next_one,) = await takes(buffer, a, 1)
    await puts(buffer, a, next_one, Weights(1, 1))
    await trains(buffer, 1, 1)
    return a, slow


@pytest.mark.asyncio
async def test_under_requeue_over_age_work_is_returned_and_its_collector_hears_of_it(make_buffer: Any) -> None:
    lims = limits(1, 1, over_age="requeue", lookahead=2.0, group_size=3)
    buffer = await make_buffer(lims)
    a, slow = await _with_an_old_ticket(buffer, lims)
    beat = await serves(buffer, a, Weights(1, 2), progress={(slow.ordinal, 0): 30})
    assert beat.revoked == ((slow.ordinal, 0),)
    stats = await buffer.stats()
    assert (stats.returns, stats.reasons.get("stale/over_age")) == ({"over_age": 1}, None)
    assert stats.lost_tokens["returned/over_age"] == 30
    assert stats.lost_length["returned/over_age"] == 10.0, "tokens so far, per member"
    (again,) = await takes(buffer, a, 2, want=1)
    assert (again.ordinal, again.attempt) == (slow.ordinal, 1)
    assert (await buffer.row(slow.ordinal)).requeues == 1


@pytest.mark.asyncio
async def test_a_ticket_is_requeued_three_times_and_then_stale(make_buffer: Any) -> None:
    lims = limits(1, 1, over_age="requeue", lookahead=2.0)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    slow, fast = await joins(buffer, "slow", Weights(1, 0)), await joins(buffer, "fast", Weights(1, 0))
    seen = []
    for turn in range(4):
        await serves(buffer, slow, Weights(1, 2 * turn))
        (late,) = await takes(buffer, slow, turn, want=1)
        assert (late.ordinal, late.attempt) == (0, turn)
        for step in (2 * turn, 2 * turn + 1):
            await serves(buffer, fast, Weights(1, step))
            (ticket,) = await takes(buffer, fast, step, want=1)
            await puts(buffer, fast, ticket, Weights(1, step))
            await trains(buffer, 1, step)
        seen.append((await buffer.row(0)).state)
    assert seen == [State.RETURNED] * 3 + [State.STALE]
    assert (await buffer.stats()).reasons["stale/over_age"] == 1


@pytest.mark.asyncio
async def test_under_mask_a_group_stays_while_its_newest_token_is_young_enough(make_buffer: Any) -> None:
    lims = limits(1, 1, over_age="mask", lookahead=2.0)
    buffer = await make_buffer(lims)
    a, slow = await _with_an_old_ticket(buffer, lims)
    beat = await serves(buffer, a, Weights(1, 2), progress={(slow.ordinal, 0): 30})
    assert beat.revoked == (), "in work it still gets newer tokens"
    assert await puts(buffer, a, slow, Weights(1, 0), Weights(1, 2)) == "held"
    assert (await buffer.row(slow.ordinal)).lo == 2
    assert await trains(buffer, 1, 2) == (slow.ordinal,)


@pytest.mark.asyncio
async def test_under_mask_a_group_whose_newest_token_is_too_old_is_stale_on_arrival(make_buffer: Any) -> None:
    lims = limits(1, 1, over_age="mask", lookahead=2.0)
    buffer = await make_buffer(lims)
    a, slow = await _with_an_old_ticket(buffer, lims)
    assert await puts(buffer, a, slow, Weights(1, 0)) == "ended"
    assert (await buffer.stats()).reasons["stale/over_age"] == 1


@pytest.mark.asyncio
async def test_what_is_lost_keeps_its_reward_and_length_beside_what_is_trained(make_buffer: Any) -> None:
    lims = limits(1, 1, max_steps=5)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    first, second = await takes(buffer, a, 0)
    await puts(buffer, a, first)
    lost = {"tokens": 64, "seconds": 2.0, "reward": 0.25, "length": 32.0}
    await buffer.fail(a, second.ordinal, 0, kind="filtered", reason="zero_variance", **lost)
    stats = await buffer.stats()
    assert (stats.reasons, stats.filtered_in_row) == ({"filtered/zero_variance": 1}, 1)
    assert stats.lost_reward == {"filtered/zero_variance": 0.25}
    await trains(buffer, 1, 0)
    stats = await buffer.stats()
    assert stats.lost_length == {"filtered/zero_variance": 32.0, "trained/trained": header(first).length}
    assert stats.states[State.FILTERED] == 1


@pytest.mark.asyncio
async def test_filtered_tickets_in_a_row_are_counted_until_a_group_is_held(make_buffer: Any) -> None:
    lims = limits(0, 3)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    tickets = await takes(buffer, a, 0)
    for ticket in tickets[:2]:
        await buffer.fail(a, ticket.ordinal, 0, kind="filtered", reason="zero_variance", tokens=1, seconds=0.0)
    assert (await buffer.stats()).filtered_in_row == 2
    assert [t.ordinal for t in await takes(buffer, a, 1)] == [3, 4], "their room is refilled at once"
    await puts(buffer, a, tickets[2])
    assert (await buffer.stats()).filtered_in_row == 0


@pytest.mark.asyncio
@pytest.mark.parametrize(("policy", "at_once"), [("wait", 1), ("drop", 0), ("requeue", 0), ("mask", 0)])
async def test_who_lags_just_after_a_commit_gets_tickets_for_the_old_weights_only_where_that_loses_nothing(
    make_buffer: Any, clock: Clock, policy: str, at_once: int
) -> None:
    lims = limits(1, 1, over_age=policy)
    buffer = await make_buffer(lims, clock)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    (ticket,) = await takes(buffer, a, 0, want=1)
    await puts(buffer, a, ticket)
    await trains(buffer, 1, 0)
    assert len(await takes(buffer, a, 1, want=1)) == at_once, "it still serves version 0"
    clock.now += 2.0
    await serves(buffer, a, Weights(1, 0))
    assert len(await takes(buffer, a, 1, want=1)) == 1, "it may serve it for long: its transfer is slow"


@pytest.mark.asyncio
async def test_who_serves_the_new_weights_just_after_a_commit_gets_tickets_at_once(make_buffer: Any) -> None:
    lims = limits(1, 1, over_age="drop")
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    (ticket,) = await takes(buffer, a, 0, want=1)
    await puts(buffer, a, ticket)
    await trains(buffer, 1, 0)
    await serves(buffer, a, Weights(1, 1))
    assert len(await takes(buffer, a, 1, want=2)) == 2
