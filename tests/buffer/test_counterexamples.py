"""The contract's counterexamples, each as the shortest schedule that shows it, on the model and on the server."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.buffers.base import BufferError, Fenced, Lease, State
from asyncrl.buffers.limits import Limits
from asyncrl.staleness import Candidate, Weights, choose_batch
from tests.buffer.acts import PAYLOAD, joins, limits, puts, serves, starts, takes, trains


@pytest.mark.asyncio
async def test_a_group_of_dead_weights_is_returned_not_held(make_buffer: Any) -> None:
    lims = limits(2, 1)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    for step in range(3):
        (ticket, *rest) = await takes(buffer, a, step, want=1)
        assert not rest
        assert await puts(buffer, a, ticket) == "held"
        await trains(buffer, 1, step)
        await serves(buffer, a, Weights(1, step + 1))
    (old,) = await takes(buffer, a, 10, want=1)
    await buffer.checkpointed(1, 1)
    assert await starts(buffer, lims, Weights(1, 1)) == 2
    # The collector is still on (1, 3): version 3 of lineage 2 will be other weights.
    assert await puts(buffer, a, old, Weights(1, 3)) in ("returned", "refused")
    beat = await serves(buffer, a, Weights(1, 3))
    assert beat.announced == Weights(2, 1)
    assert await takes(buffer, a, 11) == []


@pytest.mark.asyncio
async def test_nothing_is_issued_between_lease_and_commit_that_would_expire(make_buffer: Any) -> None:
    lims = limits(0, 4)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    tickets = await takes(buffer, a, 0)
    assert len(tickets) == 4
    await buffer.fail(a, 3, 0, kind="data", reason="bad_row", tokens=0, seconds=0.0)  # its room is free at once
    (fifth,) = await takes(buffer, a, 1)
    for ticket in [*tickets[:3], fifth]:
        await puts(buffer, a, ticket)
    lease = await buffer.lease(1, 0, wait_s=0.0)
    assert lease.ordinals == (0, 1, 2, 4)
    assert await takes(buffer, a, 2) == [], "issued for version 0 now, it could only be trained by step 0"
    await buffer.commit(1, 0)
    await serves(buffer, a, Weights(1, 1))
    assert len(await takes(buffer, a, 2)) == 4, "the request still waits: the same number is asked again"


@pytest.mark.asyncio
async def test_a_new_lineage_is_served_although_its_version_is_lower(make_buffer: Any) -> None:
    lims = limits(1, 1)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    for step in range(4):
        for ticket in await takes(buffer, a, step, want=1):
            await puts(buffer, a, ticket)
        await trains(buffer, 1, step)
        await serves(buffer, a, Weights(1, step + 1))
    assert await starts(buffer, lims, Weights(1, 2)) == 2
    assert (await serves(buffer, a, Weights(1, 4))).announced == Weights(2, 2) > Weights(1, 4)
    await serves(buffer, a, Weights(2, 2))
    assert await takes(buffer, a, 9), "with the announced weights it gets work again"


@pytest.mark.asyncio
async def test_payloads_kept_for_a_rewind_give_way_to_tickets(make_buffer: Any) -> None:
    lims = limits(1, 1, max_bytes=20)  # exactly (k + 1) x B groups
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    first, second = await takes(buffer, a, 0)
    await puts(buffer, a, first)
    await puts(buffer, a, second)
    await trains(buffer, 1, 0)
    await trains(buffer, 1, 1)
    stats = await buffer.stats()
    assert stats.bytes_kept == 2 * len(PAYLOAD), "both consist of tokens of the checkpointed version 0"
    await serves(buffer, a, Weights(1, 2))
    assert len(await takes(buffer, a, 1)) == 2
    stats = await buffer.stats()
    assert stats.bytes_kept + stats.bytes_held + stats.bytes_reserved <= 20


@pytest.mark.asyncio
async def test_a_kept_payload_is_held_again_after_a_rewind_and_a_dropped_one_is_generated_again(
    make_buffer: Any,
) -> None:
    lims = limits(1, 1)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    first, second = await takes(buffer, a, 0)
    await puts(buffer, a, first)
    await puts(buffer, a, second, Weights(1, 0))
    await trains(buffer, 1, 0)
    await serves(buffer, a, Weights(1, 1))
    (third,) = await takes(buffer, a, 1)
    await puts(buffer, a, third)  # tokens of version 1, beyond the checkpoint
    await trains(buffer, 1, 1)
    await trains(buffer, 1, 2)
    await starts(buffer, lims, Weights(1, 0))
    rows = {row.ordinal: row for row in (await buffer.snapshot())[1]}
    assert [rows[n].state for n in range(3)] == [State.HELD, State.HELD, State.RETURNED]
    assert rows[2].attempt == 1
    assert await trains(buffer, 2, 0) == (0,)


@pytest.mark.asyncio
async def test_a_smaller_batch_after_a_resume_sheds_what_it_cannot_train_in_time(make_buffer: Any) -> None:
    big, small = limits(1, 4), limits(1, 2)
    buffer = await make_buffer(big)
    await starts(buffer, big)
    a = await joins(buffer, "a", Weights(1, 0))
    for ticket in await takes(buffer, a, 0):
        await puts(buffer, a, ticket)
    await starts(buffer, small, Weights(1, 0))
    states = [row.state for row in (await buffer.snapshot())[1]]
    assert states == [State.HELD] * 4 + [State.RETURNED] * 4
    assert await trains(buffer, 2, 0) == (0, 1)
    assert await trains(buffer, 2, 1) == (2, 3)


def test_the_earliest_dues_are_tried_where_the_oldest_ready_tickets_fail_the_test() -> None:
    # B 2, k 2, V 2. Tickets 0 and 1 are young; 2 and 3 must be trained by step 3, and 4 (unfinished) as well.
    live = [
        Candidate(0, held=True, lo=2),
        Candidate(1, held=True, lo=2),
        Candidate(2, held=True, lo=1),
        Candidate(3, held=True, lo=1),
        Candidate(4, held=False, lo=1),
    ]
    rules: dict[str, Any] = {"version": 2, "max_age": 2, "groups_per_step": 2, "lookahead": 1.5, "more_to_come": True}
    assert choose_batch(live, guard_dues=True, **rules).batch == (2, 3)
    # Without the guard the oldest two go first, and then three tickets are due for the two places of step 3.
    assert choose_batch(live, guard_dues=False, **rules).batch == (0, 1)


@pytest.mark.asyncio
async def test_a_checkpoint_beyond_the_acknowledged_commits_is_refused(make_buffer: Any) -> None:
    lims = limits(1, 1)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    (ticket,) = await takes(buffer, a, 0, want=1)
    await puts(buffer, a, ticket)
    assert isinstance(await buffer.lease(1, 0, wait_s=0.0), Lease)
    with pytest.raises(BufferError, match="version 1"):
        await buffer.checkpointed(1, 1)  # trained, but not committed: the group would be trained again
    with pytest.raises(BufferError, match="beyond"):
        await buffer.new_lineage(parent=Weights(1, 1), limits=lims)


@pytest.mark.asyncio
async def test_a_fenced_learner_can_do_nothing_and_its_checkpoints_are_not_resumed_from(make_buffer: Any) -> None:
    lims = limits(1, 1)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    for step in range(2):
        (ticket,) = await takes(buffer, a, step, want=1)
        await puts(buffer, a, ticket)
        await trains(buffer, 1, step)
        await serves(buffer, a, Weights(1, step + 1))
    await starts(buffer, lims, Weights(1, 1))
    for call in (
        buffer.lease(1, 2, wait_s=0.0),
        buffer.commit(1, 2),
        buffer.checkpointed(1, 2),
        buffer.announce(Weights(1, 2), {}),
    ):
        with pytest.raises(Fenced, match="lineage 1 was replaced by lineage 2"):
            await call
    with pytest.raises(BufferError, match="not on the current branch"):
        await buffer.new_lineage(parent=Weights(1, 2), limits=lims)


@pytest.mark.asyncio
async def test_a_skipped_step_moves_the_version_and_consumes_its_batch(make_buffer: Any) -> None:
    lims = limits(0, 1)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    (ticket,) = await takes(buffer, a, 0)
    await puts(buffer, a, ticket)
    await trains(buffer, 1, 0, skipped=True)
    stats = await buffer.stats()
    assert (stats.version, stats.reasons) == (1, {"trained/skipped": 1})
    await serves(buffer, a, Weights(1, 1))
    assert [t.ordinal for t in await takes(buffer, a, 1)] == [1]


@pytest.mark.asyncio
async def test_a_group_older_than_its_promise_is_returned(make_buffer: Any) -> None:
    lims = limits(2, 1)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    (ticket,) = await takes(buffer, a, 0, want=1)
    await puts(buffer, a, ticket)
    await trains(buffer, 1, 0)
    await serves(buffer, a, Weights(1, 1))
    (promised,) = await takes(buffer, a, 1, want=1)
    assert await puts(buffer, a, promised, Weights(1, 0)) == "returned"
    (again,) = await takes(buffer, a, 2, want=1)
    assert (again.ordinal, again.attempt) == (promised.ordinal, 1)


@pytest.mark.asyncio
async def test_the_last_commit_ends_every_live_ticket(make_buffer: Any) -> None:
    lims = limits(1, 1, max_steps=2)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    first, second = await takes(buffer, a, 0)
    await puts(buffer, a, first)
    await trains(buffer, 1, 0)
    await puts(buffer, a, second)
    lease = await buffer.lease(1, 1, wait_s=0.0)
    await serves(buffer, a, Weights(1, 1))
    assert await takes(buffer, a, 1) == [], "two steps are two groups: no ticket that could not be trained"
    commit = await buffer.commit(1, 1)
    assert (commit.ended, lease.ordinals) == (True, (1,))
    stats = await buffer.stats()
    assert sum(stats.states[s] for s in (State.RETURNED, State.ISSUED, State.HELD, State.LEASED)) == 0


@pytest.mark.asyncio
async def test_room_is_freed_by_the_version_not_by_the_put(make_buffer: Any) -> None:
    lims = limits(1, 2)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    tickets = await takes(buffer, a, 0)
    assert len(tickets) == 4, "(1 + k) x B"
    for ticket in tickets:
        await puts(buffer, a, ticket)
    assert await takes(buffer, a, 1) == []
    assert isinstance(await buffer.lease(1, 0, wait_s=0.0), Lease)
    assert await takes(buffer, a, 1) == [], "nor by the lease"
    await buffer.commit(1, 0)
    assert await takes(buffer, a, 1) == [], "still on version 0, it has (1 + 1 - 1) x 2 of room, and 2 are live"
    await serves(buffer, a, Weights(1, 1))
    assert [t.ordinal for t in await takes(buffer, a, 1)] == [4, 5]


def test_a_lookahead_beyond_two_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"lookahead is 2\.5.*expire"):
        limits(1, 1, lookahead=2.5)


def test_limits_that_would_deadlock_are_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="could never be filled"):
        limits(1, 4, max_bytes=79)
    with pytest.raises(ValueError, match="publish_every 3"):
        limits(1, 4, publish_every=3)


@pytest.mark.asyncio
async def test_under_drop_over_age_work_ends_as_stale_and_its_collector_hears_of_it(make_buffer: Any) -> None:
    lims = limits(1, 1, over_age="drop", max_steps=10, lookahead=2.0)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    slow, fast = await takes(buffer, a, 0)
    await puts(buffer, a, fast)
    await trains(buffer, 1, 0)
    await serves(buffer, a, Weights(1, 1))
    (next_one,) = await takes(buffer, a, 1)
    await puts(buffer, a, next_one)
    await trains(buffer, 1, 1)
    beat = await serves(buffer, a, Weights(1, 2), progress={(slow.ordinal, 0): 30})
    assert beat.revoked == ((slow.ordinal, 0),)
    stats = await buffer.stats()
    assert stats.reasons["stale/over_age"] == 1
    assert await puts(buffer, a, slow) == "refused"


@pytest.mark.asyncio
async def test_a_bounded_number_of_tickets_ends_with_a_short_batch(make_buffer: Any) -> None:
    lims: Limits = limits(1, 2, max_tickets=3)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    for ticket in await takes(buffer, a, 0):
        await puts(buffer, a, ticket)
    assert await trains(buffer, 1, 0) == (0, 1)
    assert await trains(buffer, 1, 1) == (2,)
    end = await buffer.lease(1, 2, wait_s=0.0)
    assert isinstance(end, Lease)
    assert end.ordinals == ()
