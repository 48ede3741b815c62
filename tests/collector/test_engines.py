"""Engines that fail, hang or refuse under a collector, and work that is taken away from them."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter

import pytest

from asyncrl.buffers.audit import ledger_problems
from asyncrl.buffers.base import State
from asyncrl.collectors import fleet
from asyncrl.collectors.engines import simulated
from asyncrl.collectors.engines.base import EngineError
from asyncrl.collectors.fleet import CollectorError
from asyncrl.collectors.scoring import SimulatedScorer
from asyncrl.rewards.scoring import Score

pytestmark = pytest.mark.asyncio


async def test_requests_of_a_failed_engine_go_on_at_the_one_that_is_started_in_its_place(kit, engines):
    recipe = kit.recipe()
    buffer = kit.buffer(recipe)
    learner = kit.learner(buffer)
    async with kit.collecting(recipe, buffer):
        await learner.start()
        for _ in range(3):
            await learner.step()
        await engines[-1].close()  # what is asked of it from now on raises EngineError
        for _ in range(3):
            await learner.step()
    assert len(engines) == 2
    assert (await buffer.stats()).states[State.TRAINED] == 12
    assert max(ticket.losses for ticket in buffer.model.all.values()) == 0


async def test_an_engine_that_fails_again_and_again_ends_the_collector(kit, engines, monkeypatch):
    async def dies(self, request):
        raise EngineError("out of memory")

    monkeypatch.setattr(simulated.SimulatedEngine, "generate", dies)
    recipe = kit.recipe()
    buffer = kit.buffer(recipe, max_losses=100)
    await kit.learner(buffer).start()
    with pytest.raises(CollectorError, match="failed 6 times in a row, last: out of memory"):
        async with kit.collecting(recipe, buffer) as task:
            await asyncio.wait({task}, timeout=kit.limit_s)
    states = Counter(ticket.state for ticket in buffer.model.all.values())
    assert states == {State.RETURNED: 4}


async def test_an_engine_that_hangs_is_noticed_and_started_again(kit, engines, monkeypatch):
    recipe = kit.recipe(collector={"group_timeout_s": 0.2})
    buffer = kit.buffer(recipe, member_timeout_s=0.4)
    learner = kit.learner(buffer)
    generate = simulated.SimulatedEngine.generate

    async def sometimes(self, request):
        if self is engines[0]:
            await asyncio.sleep(kit.limit_s)
        return await generate(self, request)

    async def close(self):
        raise EngineError("the decode thread is still in a forward")

    monkeypatch.setattr(simulated.SimulatedEngine, "generate", sometimes)
    monkeypatch.setattr(simulated.SimulatedEngine, "close", close)
    async with kit.collecting(recipe, buffer):
        await learner.start()
        for _ in range(6):
            await learner.step()
    assert len(engines) == 2


async def test_a_prompt_that_takes_engines_with_it_fails_as_poison_and_the_others_are_trained(
    kit, engines, monkeypatch
):
    generate = simulated.SimulatedEngine.generate

    async def dies(self, request):
        if request.ticket == 3:
            await asyncio.sleep(0.01)
            await self.close()
            raise EngineError("device-side assert")
        return await generate(self, request)

    monkeypatch.setattr(simulated.SimulatedEngine, "generate", dies)
    recipe = kit.recipe(collector={"engines": 2})
    buffer = kit.buffer(recipe)
    learner = kit.learner(buffer)
    async with kit.collecting(recipe, buffer):
        await learner.start()
        for _ in range(6):
            await learner.step()
    stats = await buffer.stats()
    assert (stats.states[State.TRAINED], stats.reasons["failed/poison"]) == (12, 1)
    assert buffer.model.all[3].state is State.FAILED


@pytest.mark.parametrize("update", ["keep", "abort-and-continue"])
async def test_whichever_engines_are_lost_and_when_every_answer_is_whole_and_its_versions_never_fall(
    kit, engines, monkeypatch, update
):
    monkeypatch.setattr(fleet, "MOST_RESTARTS", 10**6)
    chosen = random.Random(5)
    recipe = kit.recipe(
        run={"max_steps": 12},
        collector={
            "engines": 4,
            "engine": {"type": "simulated", "slots": 4, "token_s": 0.001, "mean_tokens": 40.0},
            "sampling": {"max_tokens": 4000},
        },
        weights={"update": update},
        buffer={"max_trajectory_age": 3},
    )
    buffer = kit.buffer(recipe)
    learner = kit.learner(buffer)

    def at_work():
        return [engine for engine in engines if any(engine.progress(id) >= 3 for id in engine._running)]

    def used_up():
        """All that the window lets in is answered, as when this process was not given the time to look: only a step
        brings more."""
        states = Counter(ticket.state for ticket in buffer.model.all.values())
        return states[State.HELD] >= min(8, 24 - states[State.TRAINED])

    lost = 0
    async with kit.collecting(recipe, buffer) as task:
        await learner.start()
        for _ in range(10):
            await kit.until(lambda: at_work() or used_up(), task)
            if working := at_work():
                await chosen.choice(working).close()
                lost += 1
            await learner.step()
        for _ in range(2):
            await learner.step()
    rows = [row for batches in learner.batches.values() for batch in batches for row in batch.to_pylist()]
    assert len({(row["ticket"], row["member"]) for row in rows}) == len(rows) == 48
    for row in rows:
        length = 40.0 * simulated.relative_length(recipe.run.seed, row["ticket"], row["member"], 1.0)
        assert (row["finish_reason"], sum(row["loss_mask"])) == ("stop", max(1, round(length)))
        versions = [span["version"] for span in row["spans"]]
        assert versions == sorted(set(versions)), "one span a stretch"
    assert len(engines) - 4 > lost / 2 > 0, "and most of those that were lost were started again by then"
    assert any("," in row["engine"] for row in rows)
    stats = await buffer.stats()
    assert ledger_problems(*(await buffer.snapshot()), buffer.limits) == []
    assert (stats.states[State.TRAINED], stats.refused_puts) == (24, 0)


@pytest.fixture
def deaf(monkeypatch):
    """The first engine answers nobody any more once it has a request; `engines` may not have asked for one yet."""
    generate, found = simulated.SimulatedEngine.generate, []

    async def sometimes(self, request):
        if self.name == "c0/0" and found in ([], [self]):
            found[:] = [self]
            await asyncio.Event().wait()
        return await generate(self, request)

    async def check(self):
        if found == [self]:
            await asyncio.Event().wait()

    monkeypatch.setattr(simulated.SimulatedEngine, "generate", sometimes)
    monkeypatch.setattr(simulated.SimulatedEngine, "check", check)
    monkeypatch.setattr(fleet, "CHECK_LIMIT_S", 0.1)
    return found


async def test_an_engine_that_does_not_answer_its_health_check_is_left_long_before_it_counts_as_still(
    kit, engines, deaf, monkeypatch, caplog
):
    monkeypatch.setattr(fleet, "CHECK_S", 0.05)
    recipe = kit.recipe(collector={"engines": 2})
    buffer = kit.buffer(recipe)
    learner = kit.learner(buffer)
    async with kit.collecting(recipe, buffer):
        await learner.start()
        for _ in range(6):
            await learner.step()
    assert deaf
    assert "did not answer its health check within 0.1 s" in caplog.text
    assert len(engines) == 3
    assert {ticket.losses for ticket in buffer.model.all.values()} == {0}


async def test_without_health_checks_its_requests_would_wait_for_group_timeout_s(kit, engines, deaf, monkeypatch):
    """Negative control of the test above."""
    monkeypatch.setattr(fleet, "CHECK_S", kit.limit_s)
    recipe = kit.recipe(collector={"engines": 2})
    buffer = kit.buffer(recipe)
    learner = kit.learner(buffer)
    async with kit.collecting(recipe, buffer):
        await learner.start()
        steps = asyncio.ensure_future(all_steps(learner))
        done, _ = await asyncio.wait({steps}, timeout=1.5)
        assert done == set()
        steps.cancel()
    assert len(engines) == 2


async def all_steps(learner):
    for _ in range(6):
        await learner.step()


@pytest.mark.parametrize(("most", "groups"), [("auto", 8), (3, 3)])
async def test_groups_that_hold_no_slots_keep_others_from_starting_once_there_are_so_many(
    kit, monkeypatch, most, groups
):
    async def never(self, *args, **kwargs):
        await asyncio.Event().wait()

    monkeypatch.setattr(SimulatedScorer, "score", never)
    engine = {"type": "simulated", "slots": 4, "token_s": 0.0001, "mean_tokens": 10.0}
    recipe = kit.recipe(collector={"engine": engine, "max_concurrent_groups": most}, buffer={"max_trajectory_age": 20})
    buffer = kit.buffer(recipe)
    async with kit.collecting(recipe, buffer) as task:
        await kit.learner(buffer).start()
        await kit.until(lambda: buffer.model.next_ordinal == groups, task)
        await asyncio.sleep(0.2)
        assert buffer.model.next_ordinal == groups


async def test_a_group_that_ends_long_after_its_slots_were_free_makes_room_for_the_next(kit, monkeypatch):
    """As with a judge: while it waits for scores nothing is generated, so no slot is freed when it ends."""

    async def late(self, *args, **kwargs):
        await asyncio.sleep(0.1)
        return Score({"judge": 1.0}, 1.0, "")

    monkeypatch.setattr(SimulatedScorer, "score", late)
    recipe = kit.recipe(collector={"max_concurrent_groups": 1})  # and a step needs two
    buffer = kit.buffer(recipe)
    learner = kit.learner(buffer)
    async with kit.collecting(recipe, buffer):
        await learner.start()
        await learner.step()


@pytest.fixture
def one_fails(monkeypatch):
    """Of each group the engine gives up on the last member, or refuses it."""
    generate = simulated.SimulatedEngine.generate
    ways = {"how": "abort"}

    async def fails(self, request):
        if request.member != 2:
            return await generate(self, request)
        if ways["how"] == "refuse":
            raise ValueError(f"request {request.id}: too long")
        running = asyncio.ensure_future(generate(self, request))
        await asyncio.sleep(0)  # it is submitted then
        self.abort([request.id])
        return await running

    monkeypatch.setattr(simulated.SimulatedEngine, "generate", fails)
    return ways


@pytest.mark.parametrize(("how", "failure"), [("abort", "engine_aborted"), ("refuse", "request_refused")])
async def test_a_group_goes_without_members_that_the_engine_failed(kit, one_fails, how, failure):
    one_fails["how"] = how
    recipe = kit.recipe(collector={"group_size": 3, "min_members": 2})
    buffer = kit.buffer(recipe)
    learner = kit.learner(buffer)
    async with kit.collecting(recipe, buffer):
        await learner.start()
        for batch in [*await learner.step(), *await learner.step()]:
            assert batch.column("failure").to_pylist() == ["", "", failure]
            assert [math.isnan(reward) for reward in batch.column("reward").to_pylist()] == [False, False, True]
    assert max(ticket.losses for ticket in buffer.model.all.values()) == 0


@pytest.mark.parametrize(("how", "ended"), [("abort", "failed/poison"), ("refuse", "failed/request_refused")])
async def test_without_min_members_every_member_must_be_answered(kit, one_fails, how, ended):
    one_fails["how"] = how
    recipe = kit.recipe(collector={"group_size": 3})
    buffer = kit.buffer(recipe)
    async with kit.collecting(recipe, buffer) as task:
        await kit.learner(buffer).start()
        await kit.until(lambda: buffer.model.reasons.get(ended, 0) >= 4, task)
    assert buffer.model.all[0].header is None


async def test_groups_spread_over_engines_and_the_oldest_weights_are_reported(kit, engines):
    recipe = kit.recipe(
        collector={"engines": 2, "engine": {"type": "simulated", "slots": 4, "token_s": 0.001, "mean_tokens": 10.0}}
    )
    buffer = kit.buffer(recipe)
    learner = kit.learner(buffer)
    async with kit.collecting(recipe, buffer):
        await learner.start()
        for _ in range(6):
            await learner.step()
    used = {name for batches in learner.batches.values() for b in batches for name in b.column("engine").to_pylist()}
    assert used == {"c0/0", "c0/1"}
    for batches in learner.batches.values():
        for batch in batches:
            assert len(set(batch.column("engine").to_pylist())) == 1


async def test_a_ticket_taken_away_is_dropped_and_its_slots_are_free(kit):
    """No token within the ticket's own limit: the run takes both back and issues them again."""
    recipe = kit.recipe(collector={"engine": {"type": "simulated", "slots": 4, "token_s": 5.0}})
    buffer = kit.buffer(recipe, member_timeout_s=0.4, ticket_progress_s=0.3)
    async with kit.collecting(recipe, buffer) as task:
        await kit.learner(buffer).start()

        def revoked():
            member = buffer.model.members.get("c0-1")
            return member is not None and member.info.get("failures", {}).get("revoked", 0) >= 2

        await kit.until(revoked, task)
        await kit.until(lambda: [t.attempt for t in buffer.model.all.values()] == [1, 1], task)
    assert [ticket.losses for ticket in buffer.model.all.values()] == [1, 1]


@pytest.mark.parametrize("policy", ["drop", "requeue"])
async def test_cancelled_work_reaches_the_engine_which_samples_nothing_more_of_it(kit, engines, monkeypatch, policy):
    """Ticket 0 never ends by itself; at version 2 its tokens of version 0 are over age."""
    length = simulated.relative_length
    monkeypatch.setattr(
        simulated, "relative_length", lambda seed, ticket, *rest: 1e6 if ticket == 0 else length(seed, ticket, *rest)
    )
    recipe = kit.recipe(buffer={"over_age": policy})
    buffer = kit.buffer(recipe, over_age=policy)
    learner = kit.learner(buffer)
    async with kit.collecting(recipe, buffer) as task:
        await learner.start()
        await kit.until(lambda: engines and engines[0].progress("0.0.0") > 0, task)
        await learner.step()
        assert engines[0].progress("0.0.1") > 0
        await learner.step()
        await kit.until(lambda: engines[0].progress("0.0.0") == engines[0].progress("0.0.1") == 0, task)
        if policy == "requeue":
            await kit.until(lambda: engines[0].progress("0.1.0") > 0, task)  # the next attempt, in the same slots
    stats = await buffer.stats()
    lost = "stale/over_age" if policy == "drop" else "returned/over_age"
    assert stats.lost_tokens[lost] > 0
    assert stats.returns.get("over_age", 0) == (1 if policy == "requeue" else 0)
