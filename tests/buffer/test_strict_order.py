"""A lookahead of 1: which tickets a step trains depends on nothing that is fast or slow, lost or rewound."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.buffers.base import Lease, State, Waiting
from asyncrl.buffers.limits import Limits
from asyncrl.buffers.memory import MemoryBuffer
from asyncrl.buffers.reference.model import Model
from asyncrl.staleness import Choice, Weights, choose_batch
from tests.buffer.acts import PAYLOAD, joins, limits, puts, serves, starts, takes, trains
from tests.buffer.driver import Clock, Driver, Faults, random_limits, random_run

POLICIES = ["wait", "drop", "mask", "requeue"]
SEEDS = st.integers(0, 2**31)


class _SameBatches(Driver):
    """Learners that resume keep the batch size: the recipe's does not change there."""

    async def crash_learner(self) -> None:
        await self.start_learner(self.rng.choice([None, *self.checkpoints]))


def _out_of_order(seed: int, *, lookahead: float) -> list[int]:
    """Tickets that some step of a random schedule trained which was not theirs: collectors, replies and learners are
    lost, steps skipped, groups damaged, but no ticket ends without being trained."""
    rng, clock = random.Random(seed), Clock()
    lims = replace(random_limits(rng, "wait"), max_uses=1, lookahead=lookahead, max_losses=10**6)
    driver = _SameBatches([MemoryBuffer("r", lims, clock=clock)], clock, rng, lims, Faults(fail=0.0, learner=0.03))
    asyncio.run(driver.run(200))
    if asyncio.run(driver.buffers[0].stats()).reasons.get("stale/straggler"):
        return []  # one that was given up for its time: later ones move up
    B = lims.groups_per_step
    return [n for n, uses in driver.trained.items() for _, step in uses if step != n // B]


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_step_v_trains_tickets_v_times_b_and_on_whatever_is_lost(seed: int) -> None:
    assert _out_of_order(seed, lookahead=1.0) == []


def test_with_a_lookahead_it_depends_on_the_schedule() -> None:
    """Negative control."""
    assert any(_out_of_order(seed, lookahead=1.5) for seed in range(20))


@pytest.mark.asyncio
async def test_a_ticket_that_came_back_is_not_passed(make_buffer: Any) -> None:
    lims = limits(2, 1, lookahead=1.0)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    b = await joins(buffer, "b", Weights(1, 0))
    (first,) = await takes(buffer, a, 0, want=1)
    for ticket in await takes(buffer, b, 0, want=2):
        await puts(buffer, b, ticket)
    waits = await buffer.lease(1, 0, wait_s=0.0)
    assert isinstance(waits, Waiting)
    assert (waits.for_ordinals, waits.members) == ((0,), ("a",))
    assert await buffer.fail(
        a, first.ordinal, first.attempt, kind="infrastructure", reason="engine_failed", tokens=0, seconds=0.0
    ) == "returned"  # fmt: skip
    waits = await buffer.lease(1, 0, wait_s=0.0)
    assert isinstance(waits, Waiting)
    assert (waits.for_ordinals, waits.members) == ((0,), ())
    assert waits.reason == "tickets 0 on no collector"
    (again,) = await takes(buffer, b, 1, want=1)
    await puts(buffer, b, again)
    assert await trains(buffer, 1, 0) == (0,)


async def _resumed_with_smaller_steps(buffer: Any) -> Lease | Waiting:
    """k 1, B 2, and no byte to spare. Step 1 trains 2 and 3, whose payloads then give way to 6 and 7. The learner goes
    on before that step with B 1: 4 and 5 are held, both due at step 2, so that beside them 2 has no room in time."""
    lims = limits(1, 2, lookahead=1.0, group_bytes=len(PAYLOAD), max_bytes=4 * len(PAYLOAD))
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    for version in range(3):
        for ticket in await takes(buffer, a, version):
            await puts(buffer, a, ticket)
        if version < 2:
            assert await trains(buffer, 1, version) == (2 * version, 2 * version + 1)
            await buffer.announce(Weights(1, version + 1), {})
            await serves(buffer, a, Weights(1, version + 1))
        if version == 0:
            await buffer.checkpointed(1, 1)
    await starts(buffer, replace(lims, groups_per_step=1), Weights(1, 1))
    await serves(buffer, a, Weights(2, 1))
    assert await takes(buffer, a, 3) == []
    states = {row.ordinal: row.state for row in (await buffer.snapshot())[1]}
    assert [states[n] for n in (2, 3, 4, 5)] == [State.RETURNED, State.RETURNED, State.HELD, State.HELD]
    lease: Lease | Waiting = await buffer.lease(2, 1, wait_s=0.0)
    return lease


@pytest.mark.asyncio
async def test_a_ticket_that_cannot_be_issued_before_the_step_is_not_waited_for(make_buffer: Any) -> None:
    lease = await _resumed_with_smaller_steps(await make_buffer(limits(1, 2)))
    assert isinstance(lease, Lease)
    assert lease.ordinals == (4,)


class _WaitsForAll(Model):
    """Guard removed: what came back is waited for whether it can be issued or not."""

    def _choose(self) -> Choice:
        return choose_batch(
            [self._candidate(t) for _, t in sorted(self.live.items())],
            version=self.version,
            max_age=self.limits.max_age,
            groups_per_step=self.limits.groups_per_step,
            lookahead=self.limits.lookahead,
            guard_dues=self.limits.over_age == "wait",
            more_to_come=self._more_to_come(),
            fresh_per_step=self.limits.fresh_per_step,
            returned=min(self.returned, default=None),
        )


def _strict(rng: random.Random, over_age: str) -> Limits:
    return replace(random_limits(rng, over_age), lookahead=1.0)


@pytest.mark.parametrize("over_age", POLICIES)
@settings(max_examples=30, deadline=None)
@given(seed=SEEDS)
def test_no_schedule_breaks_the_contract_in_strict_order(over_age: str, seed: int) -> None:
    asyncio.run(random_run(seed, over_age=over_age, acts=200, limits_of=_strict))


@pytest.mark.asyncio
async def test_waiting_for_what_cannot_be_issued_would_be_for_ever() -> None:
    """Negative control."""
    buffer = MemoryBuffer("r", limits(1, 2))
    buffer._model = _WaitsForAll(limits(1, 2))
    lease = await _resumed_with_smaller_steps(buffer)
    assert isinstance(lease, Waiting)
    assert lease.for_ordinals == (2,)
