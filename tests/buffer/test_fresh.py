"""A share of fresh groups in every batch: those that are trained again take the other places, or give their uses up."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.buffers.audit import ledger_problems
from asyncrl.buffers.base import FORFEITED, LIVE, Lease, State
from asyncrl.buffers.limits import Limits
from asyncrl.buffers.memory import MemoryBuffer
from asyncrl.buffers.reference.model import Model
from asyncrl.buffers.store import open_store
from asyncrl.staleness import Candidate, Weights, choose_batch, due_test, use_dues, uses_kept
from tests.buffer.acts import joins, limits, puts, serves, starts, takes, trains
from tests.buffer.driver import Clock, Driver, fresh_limits, random_run
from tests.buffer.rules import Broken

POLICIES = ["wait", "drop", "mask", "requeue"]


async def _trains_all(buffer: Any, lims: Limits, member: Any) -> list[tuple[int, ...]]:
    """One collector and one learner without faults, until nothing is left: the `uses` of every batch."""
    batches: list[tuple[int, ...]] = []
    seq = 0
    for step in range(lims.max_steps):
        await serves(buffer, member, Weights(1, step))
        while tickets := await takes(buffer, member, seq):
            seq += 1
            for ticket in tickets:
                assert await puts(buffer, member, ticket) == "held"
        lease = await buffer.lease(1, step, wait_s=0.0)
        assert isinstance(lease, Lease), f"step {step} waits for ever: {lease}, {(await buffer.stats()).states}"
        if not lease.ordinals:
            break
        batches.append(lease.uses)
        await buffer.commit(1, step)
    stats, rows = await buffer.snapshot()
    assert ledger_problems(stats, rows, lims) == []
    assert not any(stats.states[state] for state in LIVE), stats.states
    assert sum(len(row.uses) for row in rows) == sum(map(len, batches))
    return batches


async def _run(buffer: Any, lims: Limits) -> list[tuple[int, ...]]:
    await starts(buffer, lims)
    return await _trains_all(buffer, lims, await joins(buffer, "a", Weights(1, 0)))


@pytest.mark.asyncio
@pytest.mark.parametrize("over_age", POLICIES)
async def test_half_of_each_batch_is_fresh_and_the_rest_is_trained_again(make_buffer: Any, over_age: str) -> None:
    lims = limits(2, 4, max_uses=2, fresh_per_step=2, max_steps=12, over_age=over_age)
    buffer = await make_buffer(lims)
    batches = await _run(buffer, lims)
    fresh = [uses.count(0) for uses in batches]
    assert fresh[:5] == [4, 2, 2, 2, 2], "no group was there to be trained again at step 0"
    assert min(fresh) == 2
    assert {len(uses) for uses in batches} == {4}
    stats = await buffer.stats()
    assert stats.states[State.TRAINED] == sum(fresh) == stats.tickets < 30


@pytest.mark.asyncio
async def test_without_a_share_a_batch_may_have_no_fresh_group(make_buffer: Any) -> None:
    lims = limits(1, 4, max_uses=2, max_steps=4)
    assert [uses.count(0) for uses in await _run(await make_buffer(lims), lims)][:2] == [4, 0]


@pytest.mark.asyncio
async def test_uses_that_find_no_place_in_the_window_are_given_up_and_counted(make_buffer: Any) -> None:
    lims = limits(1, 4, max_uses=2, fresh_per_step=2)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    for ticket in await takes(buffer, a, 0):
        await puts(buffer, a, ticket)
    await trains(buffer, 1, 0)
    stats = await buffer.stats()
    assert stats.reasons == {FORFEITED + "min_fresh": 2, "trained/trained": 2}, "step 1 is their last, with two places"
    assert [(await buffer.row(n)).state for n in range(4)] == [State.HELD] * 2 + [State.TRAINED] * 2
    assert not isinstance(await buffer.lease(1, 1, wait_s=0.0), Lease), "two fresh groups are to come"
    await serves(buffer, a, Weights(1, 1))
    for ticket in await takes(buffer, a, 1, want=2):
        await puts(buffer, a, ticket)
    assert await trains(buffer, 1, 1) == (0, 1, 4, 5)


@pytest.mark.asyncio
async def test_the_last_batch_of_the_data_keeps_the_share_and_the_rest_is_given_up(make_buffer: Any) -> None:
    lims = limits(2, 4, max_uses=2, fresh_per_step=2, max_tickets=7)
    buffer = await make_buffer(lims)
    batches = await _run(buffer, lims)
    assert [(len(uses), uses.count(0)) for uses in batches] == [(4, 4), (4, 2), (2, 1)]
    stats = await buffer.stats()
    assert stats.states[State.TRAINED] == 7
    assert sum(n for reason, n in stats.reasons.items() if reason.startswith(FORFEITED)) == 7 * 2 - 10


@pytest.mark.asyncio
async def test_the_data_ends_also_where_its_last_group_fails(make_buffer: Any) -> None:
    lims = limits(2, 2, max_uses=2, fresh_per_step=1, max_tickets=3)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    *first, last = await takes(buffer, a, 0)
    for ticket in first:
        await puts(buffer, a, ticket)
    assert await trains(buffer, 1, 0) == (0, 1)
    assert not isinstance(await buffer.lease(1, 1, wait_s=0.0), Lease), "ticket 2 may still come"
    await buffer.fail(a, last.ordinal, last.attempt, kind="data", reason="bad", tokens=0, seconds=0.0)
    end = await buffer.lease(1, 1, wait_s=0.0)
    assert isinstance(end, Lease)
    assert end.ordinals == ()
    stats = await buffer.stats()
    assert (stats.states[State.TRAINED], stats.states[State.FAILED], stats.states[State.HELD]) == (2, 1, 0)


@pytest.mark.asyncio
async def test_a_rewind_gives_uses_back_and_the_share_holds_again(make_buffer: Any) -> None:
    lims = limits(2, 4, max_uses=2, fresh_per_step=2, max_steps=6)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    for ticket in await takes(buffer, a, 0):
        await puts(buffer, a, ticket)
    await trains(buffer, 1, 0)
    await buffer.checkpointed(1, 1)
    before = await buffer.lease(1, 1, wait_s=0.0)
    await buffer.commit(1, 1)
    await starts(buffer, lims, Weights(1, 1))
    again = await buffer.lease(2, 1, wait_s=0.0)
    assert dict(zip(again.ordinals, again.uses, strict=True)) == dict(zip(before.ordinals, before.uses, strict=True))
    assert again.uses.count(0) == 2


@pytest.mark.asyncio
async def test_a_batch_that_is_given_back_has_its_share_again(make_buffer: Any) -> None:
    lims = limits(2, 4, max_uses=2, fresh_per_step=2)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    for ticket in await takes(buffer, a, 0):
        await puts(buffer, a, ticket)
    await trains(buffer, 1, 0)
    first = await buffer.lease(1, 1, wait_s=0.0)
    dues = (await buffer.stats()).dues
    assert await buffer.release(1, 1)
    second = await buffer.lease(1, 1, wait_s=0.0)
    assert (second.ordinals, second.uses) == (first.ordinals, first.uses)
    assert (await buffer.stats()).dues == dues


# --- properties ---


@given(seed=st.integers(0, 2**31), over_age=st.sampled_from(POLICIES))
@settings(max_examples=60, deadline=None)
def test_no_schedule_deadlocks_or_breaks_the_share(seed: int, over_age: str) -> None:
    asyncio.run(random_run(seed, over_age=over_age, acts=150, limits_of=fresh_limits))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("over_age", POLICIES)
def test_no_long_schedule_deadlocks_or_breaks_the_share(over_age: str) -> None:
    for seed in range(80):
        asyncio.run(random_run(seed, over_age=over_age, acts=300, limits_of=fresh_limits))


@given(seed=st.integers(0, 2**31), over_age=st.sampled_from(POLICIES))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_server_keeps_the_share_as_the_model_does(server_url: str, seed: int, over_age: str) -> None:
    async def both() -> None:
        store = await open_store(server_url)
        try:
            rng, clock = random.Random(seed), Clock()
            lims, name = fresh_limits(rng, over_age), f"fresh-{over_age}-{seed}-{rng.random()}"
            await store.client.delete(*[key async for key in store.client.scan_iter(f"asyncrl:{{{name}}}*")] or ["-"])
            remote = await store.create_run(name, recipe={}, recipe_hash="h", limits=lims)
            remote.clock = clock
            await Driver([MemoryBuffer(name, lims, clock=clock), remote], clock, rng, lims).run(80)
        finally:
            await store.close()

    asyncio.run(both())


@given(
    k=st.integers(0, 4),
    B=st.integers(1, 6),
    fresh=st.integers(1, 6),
    uses=st.integers(1, 5),
    rows=st.integers(1, 40),
    over_age=st.sampled_from(POLICIES),
)
@settings(max_examples=100, deadline=None)
def test_a_run_to_the_end_of_its_data_ends_and_every_batch_has_its_share(
    k: int, B: int, fresh: int, uses: int, rows: int, over_age: str
) -> None:
    F = min(fresh, B)
    lims = limits(k, B, max_uses=min(uses, k + 1), fresh_per_step=F, max_tickets=rows, max_steps=200, over_age=over_age)
    batches = asyncio.run(_run(MemoryBuffer("r", lims), lims))
    for batch in batches:
        assert batch.count(0) * B >= F * len(batch)
    assert sum(batch.count(0) for batch in batches) == rows, "each group is fresh once"


@given(
    live=st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(1, 3), st.booleans()), max_size=14),
    B=st.integers(1, 4),
    F=st.integers(0, 4),
    guard=st.booleans(),
    more=st.booleans(),
)
def test_no_choice_breaks_the_share(
    live: list[tuple[bool, int, int, bool]], B: int, F: int, guard: bool, more: bool
) -> None:
    F = min(F, B)
    candidates = [
        Candidate(n, held=held or used, lo=lo, uses=uses, used=used) for n, (held, lo, uses, used) in enumerate(live)
    ]
    choice = choose_batch(
        candidates,
        version=3,
        max_age=3,
        groups_per_step=B,
        lookahead=1.5,
        guard_dues=guard,
        more_to_come=more,
        fresh_per_step=F,
    )
    fresh = sum(not candidates[n].used for n in choice.batch)
    assert len(choice.batch) in (0, B) or not more
    assert fresh * B >= F * len(choice.batch)


@given(
    owing=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=12),
    again=st.integers(0, 3),
    last=st.integers(4, 9),
)
def test_uses_are_given_up_only_where_they_find_no_step(owing: list[tuple[int, int]], again: int, last: int) -> None:
    used = [
        Candidate(n, held=True, lo=lo, uses=min(uses, lo, last - 3), used=True) for n, (lo, uses) in enumerate(owing)
    ]
    kept = uses_kept(used, version=4, max_age=3, again_per_step=again, last_step=last)

    def owed(more: int | None = None) -> Counter[int]:
        found: Counter[int] = Counter()
        for c in used:
            end = min(c.lo + 3, last)
            found.update(range(end - kept[c.ordinal] - (c.ordinal == more) + 1, end + 1))
        return found

    assert due_test(owed(), first_step=4, groups_per_step=again)
    for c in used:
        assert 0 <= kept[c.ordinal] <= c.uses <= len(use_dues(c.lo, 3, c.uses))
        assert kept[c.ordinal] == c.uses or not due_test(owed(c.ordinal), first_step=4, groups_per_step=again)


# --- controls: with the rule removed, some schedule fails ---


class BatchesWithoutTheirShare(Model):
    def _choose(self):  # type: ignore[no-untyped-def]
        own = self.limits
        self.limits = replace(own, fresh_per_step=0)
        try:
            return super()._choose()
        finally:
            self.limits = own


class UsesAreNeverGivenUp(Model):
    def _trim_uses(self):  # type: ignore[no-untyped-def]
        return None


@pytest.mark.parametrize("guardless", [BatchesWithoutTheirShare, UsesAreNeverGivenUp])
def test_some_schedule_fails_without_the_rule(guardless: type[Model]) -> None:
    for seed in range(300):
        asyncio.run(random_run(seed, over_age="wait", acts=150, limits_of=fresh_limits))  # it holds with the rule
        try:
            asyncio.run(random_run(seed, over_age="wait", acts=150, model=guardless, limits_of=fresh_limits))
        except Broken:
            return
    pytest.fail(f"300 schedules found nothing wrong with {guardless.__name__}")
