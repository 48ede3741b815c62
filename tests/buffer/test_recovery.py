"""Damage: payloads that are not what was put, clocks that jump, and a store that forgot."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.buffers.audit import ledger_problems
from asyncrl.buffers.base import BufferError, Fenced, Lease, State, UnknownMember
from asyncrl.buffers.memory import MemoryBuffer
from asyncrl.buffers.reference.model import Model
from asyncrl.staleness import Weights
from tests.buffer.acts import PAYLOAD, joins, limits, puts, serves, starts, takes, trains
from tests.buffer.driver import Clock


@pytest.mark.asyncio
async def test_a_damaged_group_is_set_aside_generated_again_and_counted(make_buffer: Any) -> None:
    lims = limits(0, 2)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    for ticket in await takes(buffer, a, 0):
        await puts(buffer, a, ticket)
    lease = await buffer.lease(1, 0, wait_s=0.0)
    await buffer.quarantine(1, 0, [1], "corrupt")
    await buffer.quarantine(1, 0, [1], "corrupt")  # its reply was lost
    stats = await buffer.stats()
    assert (stats.quarantined, stats.returns) == (1, {"corrupt": 1})
    assert await buffer.quarantined() == {"1:0": PAYLOAD}
    (again,) = await takes(buffer, a, 1)
    assert (again.ordinal, again.attempt) == (1, 1)
    await puts(buffer, a, again)
    second = await buffer.lease(1, 0, wait_s=0.0)
    assert (second.ordinals, second.attempt) == (lease.ordinals, 1)
    await buffer.commit(1, 0)


@pytest.mark.asyncio
async def test_a_prompt_whose_groups_are_always_damaged_fails_as_poison(make_buffer: Any) -> None:
    lims = limits(0, 1)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    for turn in range(3):
        (ticket,) = await takes(buffer, a, turn)
        await puts(buffer, a, ticket)
        assert isinstance(await buffer.lease(1, 0, wait_s=0.0), Lease)
        await buffer.quarantine(1, 0, [0], "foreign")
    assert (await buffer.stats()).reasons == {"failed/poison": 1}
    assert len(await buffer.quarantined()) == 3


@pytest.mark.asyncio
@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
async def test_a_clock_that_is_set_takes_nobodys_work(make_buffer: Any, clock: Clock, jump_s: float) -> None:
    lims = limits(0, 1, no_progress_s=3600.0)
    buffer = await make_buffer(lims, clock)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    (ticket,) = await takes(buffer, a, 0)
    clock.now += jump_s
    beat = await serves(buffer, a, Weights(1, 0), progress={(0, 0): 1})
    assert beat.revoked == ()
    assert isinstance(await buffer.lease(1, 0, wait_s=0.0), object)
    assert await puts(buffer, a, ticket) == "held"
    await trains(buffer, 1, 0)


@pytest.mark.asyncio
async def test_by_the_bare_clock_a_jump_would_take_everybodys_work(clock: Clock) -> None:
    """The control: the guard is that an act moves the time by a few seconds at most."""

    class FollowsTheClock(Model):
        def at(self, clock: float) -> None:
            self.now = self.stamp = clock

    lims = limits(0, 1, no_progress_s=3600.0)
    buffer = MemoryBuffer("r", lims, clock=clock)
    buffer._model = FollowsTheClock(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    await takes(buffer, a, 0)
    clock.now += 86_400.0
    await serves(buffer, a, Weights(1, 0), progress={(0, 0): 1})
    assert (await buffer.stats()).reasons == {"stale/straggler": 1}


@pytest.mark.asyncio
async def test_a_dead_collector_is_given_up_also_after_the_clock_was_set_back(make_buffer: Any, clock: Clock) -> None:
    lims = limits(0, 1)
    buffer = await make_buffer(lims, clock)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    await takes(buffer, a, 0)
    clock.now -= 86_400.0
    await clock.passes(buffer, lims.member_timeout_s + 6)  # the act that sees the jump moves nothing
    b = await joins(buffer, "b", Weights(1, 0))
    assert [(t.ordinal, t.attempt) for t in await takes(buffer, b, 0)] == [(0, 1)]


@pytest.mark.asyncio
async def test_a_store_that_lost_its_last_step_is_told_it_again(make_buffer: Any) -> None:
    lims = limits(1, 2)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    for ticket in await takes(buffer, a, 0, want=2):
        await puts(buffer, a, ticket)
    await trains(buffer, 1, 0)
    # The learner's weights contain step 1 with tickets 2 and 4 as well: the store lost its commit, the puts, the issue.
    with pytest.raises(BufferError, match="the next step starts from version 1"):
        await buffer.lease(1, 2, wait_s=0.0)
    commit = await buffer.recommit(1, 1, [(2, 0), (4, 0)])
    assert (commit.version, commit.repeated) == (2, False)
    assert (await buffer.recommit(1, 1, [(2, 0), (4, 0)])).repeated
    rows = {row.ordinal: row for row in (await buffer.snapshot())[1]}
    assert [rows[n].uses for n in (2, 4)] == [(Weights(1, 1),)] * 2
    assert rows[3].state is State.RETURNED, "it was in work, by all that is known"
    a = await joins(buffer, "a", Weights(1, 2), "a-2")
    assert [t.ordinal for t in await takes(buffer, a, 9, want=2)] == [3, 5]


@pytest.mark.asyncio
async def test_what_is_committed_again_gives_its_room_back_once_wherever_it_stands(make_buffer: Any) -> None:
    lims = limits(1, 2)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    tickets = await takes(buffer, a, 0, want=4)
    for ticket in tickets[:2]:
        await puts(buffer, a, ticket)
    # 0 is held as it was trained, 1 in another attempt, 2 is in work again, 3 too and was not trained.
    await buffer.recommit(1, 0, [(0, 0), (1, 1)])
    stats, rows = await buffer.snapshot()
    assert [row.state for row in rows] == [State.TRAINED, State.TRAINED, State.RETURNED, State.RETURNED]
    assert ledger_problems(stats, rows, lims) == []
    with pytest.raises(UnknownMember):  # it works on what this store may know otherwise
        await serves(buffer, a, Weights(1, 1))
    a = await joins(buffer, "a", Weights(1, 1), "a-2")
    assert [t.ordinal for t in await takes(buffer, a, 0, want=2)] == [2, 3]
    await buffer.recommit(1, 1, [(2, 1), (4, 0)])
    stats, rows = await buffer.snapshot()
    assert {row.ordinal: row.state for row in rows} == dict.fromkeys((0, 1, 2, 4), State.TRAINED) | {3: State.RETURNED}
    assert ledger_problems(stats, rows, lims) == []


@pytest.mark.asyncio
async def test_a_group_that_is_held_since_before_and_too_old_by_now_is_generated_again(make_buffer: Any) -> None:
    lims = limits(1, 2)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    for ticket in await takes(buffer, a, 0, want=1):
        await puts(buffer, a, ticket)
    await buffer.recommit(1, 0, [(1, 0), (2, 0)])
    await buffer.recommit(1, 1, [(3, 0), (4, 0)])  # 0 was lost with a collector, and is not among them
    stats, rows = await buffer.snapshot()
    assert rows[0].state is State.RETURNED, "under `wait` it would be waited for, for ever"
    assert ledger_problems(stats, rows, lims) == []


@pytest.mark.asyncio
async def test_a_store_that_lost_everything_learns_the_branch_and_what_it_trained(make_buffer: Any) -> None:
    lims = limits(1, 2)
    buffer = await make_buffer(lims)
    await buffer.adopt({1: Weights(0, 0), 2: Weights(1, 1)})
    await buffer.recommit(1, 0, [(0, 0), (3, 1)])  # 1 and 2 were in work
    await buffer.recommit(2, 1, [(1, 1), (4, 0)])
    lineage = await starts(buffer, lims, Weights(2, 2))
    assert lineage == 3
    rows = {row.ordinal: row for row in (await buffer.snapshot())[1]}
    assert [rows[n].state for n in range(5)] == [
        State.TRAINED,
        State.TRAINED,
        State.RETURNED,
        State.TRAINED,
        State.TRAINED,
    ]
    a = await joins(buffer, "a", Weights(3, 2))
    assert [t.ordinal for t in await takes(buffer, a, 0, want=2)] == [2, 5]


@pytest.mark.asyncio
async def test_a_lineage_that_the_store_forgot_rewinds_it_to_the_fork(make_buffer: Any) -> None:
    lims = limits(1, 1)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    for step in range(3):
        (ticket,) = await takes(buffer, a, step, want=1)
        await puts(buffer, a, ticket)
        await trains(buffer, 1, step)
        await serves(buffer, a, Weights(1, step + 1))
    await buffer.adopt({1: Weights(0, 0), 2: Weights(1, 1)})  # lineage 2 had begun when the store went away
    stats, rows = await buffer.snapshot()
    assert (stats.lineage, stats.version, stats.phase) == (2, 1, "running")
    assert [row.state for row in rows] == [State.TRAINED, State.RETURNED, State.RETURNED]
    with pytest.raises(Fenced):
        await buffer.commit(1, 3)


@pytest.mark.asyncio
async def test_a_family_tree_that_contradicts_the_stores_is_refused(make_buffer: Any) -> None:
    lims = limits(1, 1)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    with pytest.raises(BufferError, match="lineage 1 forked from"):
        await buffer.adopt({1: Weights(0, 5)})


@pytest.mark.asyncio
async def test_a_step_that_is_not_the_next_cannot_be_committed_again(make_buffer: Any) -> None:
    lims = limits(1, 1)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    with pytest.raises(BufferError, match="step 4 cannot be committed again: V is 0"):
        await buffer.recommit(1, 4, [(0, 0)])


@pytest.mark.asyncio
async def test_who_is_blocked_says_for_what_since_when_and_who_could_help(make_buffer: Any, clock: Clock) -> None:
    lims = limits(0, 1)
    buffer = await make_buffer(lims, clock)
    await starts(buffer, lims)
    began = clock.now
    a, b, c = [await joins(buffer, name, Weights(1, 0) if name != "c" else None) for name in "abc"]
    await takes(buffer, a, 0)
    await takes(buffer, b, 0)
    await takes(buffer, c, 0)
    await buffer.lease(1, 0, wait_s=0.0)
    clock.now += 3.0
    blocked = {row.who: row for row in (await buffer.stats()).blocked}
    assert set(blocked) == {"learner", "b", "c"}
    assert {row.since for row in blocked.values()} == {began}
    assert (blocked["learner"].waits_for, blocked["learner"].unblocked_by) == ("tickets 0 on a", "a")
    assert blocked["b"].waits_for.startswith("room")
    assert blocked["c"].waits_for.startswith("weights of this lineage")
