"""Random schedules: the rules hold on the reference model, the server does the same, and every guard is needed."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.buffers.base import TERMINAL, Commit
from asyncrl.buffers.memory import MemoryBuffer
from asyncrl.buffers.reference.model import Model
from asyncrl.buffers.store import open_store
from asyncrl.staleness import Lineages, Weights
from tests.buffer.driver import Clock, Driver, random_limits, random_run
from tests.buffer.rules import Broken

POLICIES = ["wait", "drop", "mask", "requeue"]
SEEDS = st.integers(0, 2**31)


@pytest.mark.parametrize("over_age", POLICIES)
@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_no_schedule_breaks_the_contract(over_age: str, seed: int) -> None:
    _run(random_run(seed, over_age=over_age, acts=200))


@pytest.mark.parametrize("over_age", POLICIES)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=SEEDS)
def test_the_server_answers_every_schedule_as_the_model_does(server_url: str, over_age: str, seed: int) -> None:
    _run(_both(server_url, seed, over_age, acts=120))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("over_age", POLICIES)
def test_hundreds_of_long_schedules_break_nothing(over_age: str) -> None:
    for seed in range(400):
        _run(random_run(seed, over_age=over_age, acts=300))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("over_age", POLICIES)
def test_long_schedules_have_the_same_answers_on_the_server(server_url: str, over_age: str) -> None:
    for seed in range(15):
        _run(_both(server_url, seed, over_age, acts=200))


async def _both(url: str, seed: int, over_age: str, acts: int) -> None:
    store = await open_store(url)
    try:
        rng, clock = random.Random(seed), Clock()
        limits = random_limits(rng, over_age)
        name = f"stateful-{over_age}-{seed}-{uuid.uuid4().hex}"  # an example may be run twice
        remote = await store.create_run(name, recipe={}, recipe_hash="h", limits=limits)
        remote.clock = clock
        await Driver([MemoryBuffer(name, limits, clock=clock), remote], clock, rng, limits).run(acts)
    finally:
        await store.close()


def _run(schedule: Coroutine[Any, Any, object]) -> None:
    asyncio.run(schedule)


# --- the contract's table of guards: with one removed, some schedule must fail ---


class _AnyAncestor(Lineages):
    def is_ancestor(self, name: Weights, current: int) -> bool:
        return True


class NoLineageInPutsAndBeats(Model):
    def __init__(self, limits):  # type: ignore[no-untyped-def]
        super().__init__(limits)
        self.tree = _AnyAncestor(self.tree.forks)


class ReturnedTicketsCountAgainstRoom(Model):
    def _before(self, ordinal):  # type: ignore[no-untyped-def]
        return sum(t.left for t in self.live.values()) + len(self.returned)


class NewTicketsFirst(ReturnedTicketsCountAgainstRoom):
    def _next_to_issue(self):  # type: ignore[no-untyped-def]
        return self.next_ordinal


class NoDueTestAtIssue(Model):
    def _due_test(self, extra):  # type: ignore[no-untyped-def]
        return True


class KeptPayloadsDoNotGiveWay(Model):
    def _make_space(self, need):  # type: ignore[no-untyped-def]
        return self.reserved + self.held_bytes + self.kept_bytes + need <= self.limits.max_bytes


class NoSheddingAtASmallerBatch(Model):
    def _keeps(self, ticket):  # type: ignore[no-untyped-def]
        return True


class OlderThanPromisedIsHeld(Model):
    def _keeps_promise(self, ticket, header):  # type: ignore[no-untyped-def]
        return True


class SkippedStepKeepsItsBatch(Model):
    def commit(self, lineage, step, skipped):  # type: ignore[no-untyped-def]
        if not skipped:
            return super().commit(lineage, step, skipped)
        self.release(lineage, step)
        return Commit(self.version, repeated=False, ended=False)


class LastCommitLeavesTicketsLive(Model):
    def _end_run(self):  # type: ignore[no-untyped-def]
        return None


class TicketsCountInsteadOfUses(Model):
    def _before(self, ordinal):  # type: ignore[no-untyped-def]
        return sum(1 for n in self.live if n < ordinal)

    def _in_time(self, serving, uses):  # type: ignore[no-untyped-def]
        return super()._in_time(serving, 1)


class UsesThatCannotFitStay(Model):
    def _forfeit(self, ticket, why, *, keep=0):  # type: ignore[no-untyped-def]
        if keep == 0:
            super()._forfeit(ticket, why)


class RowsLeaveBeforeACheckpointCoversThem(Model):
    def _is_settled(self, ticket):  # type: ignore[no-untyped-def]
        return ticket.state in TERMINAL and ticket.ordinal not in self.kept

    def new_lineage(self, parent, limits):  # type: ignore[no-untyped-def]
        self.gone_to = 0  # the second guard: such a rewind is refused
        return super().new_lineage(parent, limits)


class AQuarantinedGroupLosesItsUse(Model):
    def quarantine(self, lineage, step, ordinals, reason):  # type: ignore[no-untyped-def]
        for ordinal in ordinals:
            self.all[ordinal].uses = []
        super().quarantine(lineage, step, ordinals, reason)


@pytest.mark.parametrize(
    "guardless",
    [
        NoLineageInPutsAndBeats,
        ReturnedTicketsCountAgainstRoom,
        NewTicketsFirst,
        NoDueTestAtIssue,
        KeptPayloadsDoNotGiveWay,
        NoSheddingAtASmallerBatch,
        OlderThanPromisedIsHeld,
        SkippedStepKeepsItsBatch,
        LastCommitLeavesTicketsLive,
        TicketsCountInsteadOfUses,
        UsesThatCannotFitStay,
        RowsLeaveBeforeACheckpointCoversThem,
        AQuarantinedGroupLosesItsUse,
    ],
)
def test_some_schedule_fails_without_the_guard(guardless: type[Model]) -> None:
    for seed in range(400):
        _run(random_run(seed, over_age="wait", acts=200))  # the very same schedule holds with the guard
        try:
            _run(random_run(seed, over_age="wait", acts=200, model=guardless))
        except Broken:
            return
    pytest.fail(f"400 schedules found nothing wrong with {guardless.__name__}")
