"""The collector with the in-process buffer and simulated engines: tickets, weights, failures, evaluations."""

from __future__ import annotations

import asyncio
import math
from collections import Counter

import pytest
from msgspec import to_builtins

from asyncrl.buffers.audit import ledger_problems
from asyncrl.buffers.base import BufferError, Member, State
from asyncrl.buffers.memory import MemoryBuffer
from asyncrl.collectors import fleet
from asyncrl.collectors.engines import simulated
from asyncrl.collectors.engines.base import EngineError
from asyncrl.collectors.fleet import CollectorError
from asyncrl.collectors.updates import Updates
from asyncrl.schema import version_range
from asyncrl.staleness import Weights
from asyncrl.weights.reach import here

pytestmark = pytest.mark.asyncio


async def test_a_run_is_collected_to_its_end(kit):
    recipe = kit.recipe()
    buffer = kit.buffer(recipe)
    learner = kit.learner(buffer)
    async with kit.collecting(recipe, buffer) as task:
        await learner.start()
        for _ in range(6):
            await learner.step()
        await buffer.finish()
        async with asyncio.timeout(kit.limit_s):
            await task
    tickets = [batch.column("ticket")[0].as_py() for batches in learner.batches.values() for batch in batches]
    assert sorted(tickets) == list(range(12))
    for weights, batches in learner.batches.items():
        for batch in batches:
            assert batch.column("member").to_pylist() == [0, 1]
            assert set(batch.column("collector").to_pylist()) == {"c0"}
            assert all(
                span["checksum"] == f"{span['version']:04x}" for row in batch.column("spans") for span in row.as_py()
            )
            oldest, newest = version_range(batch)
            assert weights.version - 1 <= oldest <= newest <= weights.version
    stats = await buffer.stats()
    assert stats.states[State.TRAINED] == 12
    assert stats.refused_puts == 0
    assert stats.members == []


@pytest.mark.parametrize("update", ["keep", "recompute", "drain", "abort-and-continue"])
async def test_nothing_is_lost_or_sampled_twice_while_weights_change(kit, engines, update):
    """Answers take several steps: weights change under all of them."""
    engine = {"type": "simulated", "slots": 8, "token_s": 0.001, "mean_tokens": 60.0}
    recipe = kit.recipe(collector={"engine": engine}, weights={"update": update}, buffer={"max_trajectory_age": 3})
    buffer = kit.buffer(recipe)
    learner = kit.learner(buffer)
    async with kit.collecting(recipe, buffer):
        await learner.start()
        for _ in range(6):
            await learner.step()
    rows = [row for batches in learner.batches.values() for batch in batches for row in batch.to_pylist()]
    for row in rows:
        length = 60.0 * simulated.relative_length(recipe.run.seed, row["ticket"], row["member"], 1.0)
        assert row["finish_reason"] == "stop"
        assert sum(row["loss_mask"]) == max(1, round(length))
        versions = [span["version"] for span in row["spans"]]
        assert versions == sorted(set(versions)), "one span a stretch"
        assert len(versions) == 1 or update != "drain"
    assert len({(row["ticket"], row["member"]) for row in rows}) == len(rows) == 24
    stats = await buffer.stats()
    assert ledger_problems(*(await buffer.snapshot()), buffer.limits) == []
    assert (stats.states[State.TRAINED], stats.refused_puts, stats.reasons.get("failed/poison", 0)) == (12, 0, 0)
    assert max(ticket.losses for ticket in buffer.model.all.values()) == 0


async def test_no_ticket_is_taken_before_weights_are_served(kit):
    recipe = kit.recipe()
    buffer = kit.buffer(recipe)
    learner = kit.learner(buffer)
    async with kit.collecting(recipe, buffer) as task:
        await learner.start(announce=False)
        await kit.until(lambda: len(buffer.model.members) == 1, task)
        await asyncio.sleep(0.1)
        assert buffer.model.next_ordinal == 0
        await learner.announce()
        await kit.until(lambda: buffer.model.next_ordinal > 0, task)
        serving = (await buffer.stats()).members[0]
        assert (serving.serving, serving.checksum) == ((1, 0), "0000")


async def test_stopping_returns_every_ticket_without_a_loss(kit):
    recipe = kit.recipe(collector={"engine": {"type": "simulated", "slots": 8, "token_s": 1.0}})
    buffer = kit.buffer(recipe)
    async with kit.collecting(recipe, buffer) as task:
        await kit.learner(buffer).start()
        await kit.until(lambda: buffer.model.next_ordinal == 4, task)
    assert (await buffer.stats()).states[State.RETURNED] == 4
    assert [ticket.losses for ticket in buffer.model.all.values()] == [0] * 4


async def test_it_asks_for_what_can_start_and_a_small_engine_still_takes_a_group(kit):
    for slots, groups in ((5, 2), (1, 1)):
        engine = {"type": "simulated", "slots": slots, "token_s": 1.0}
        recipe = kit.recipe(collector={"engine": engine}, buffer={"max_trajectory_age": 4})
        buffer = kit.buffer(recipe)
        async with kit.collecting(recipe, buffer) as task:
            await kit.learner(buffer).start()
            await kit.until(lambda b=buffer, n=groups: b.model.next_ordinal >= n, task)
            await asyncio.sleep(0.1)
            assert buffer.model.next_ordinal == groups


async def test_a_member_the_run_forgot_joins_again_and_goes_on(kit, monkeypatch):
    monkeypatch.setattr("asyncrl.collectors.service.REJOIN_S", 0.01)
    recipe = kit.recipe()
    buffer = kit.buffer(recipe)
    learner = kit.learner(buffer)
    async with kit.collecting(recipe, buffer):
        await learner.start()
        await learner.step()
        await buffer.leave(Member("c0", "c0-1"))
        for _ in range(5):
            await learner.step()
        (member,) = (await buffer.stats()).members
        assert member.name == "c0"
        assert member.incarnation != "c0-1"


class Outage(MemoryBuffer):
    """A store that is away for the next `failures` calls of a collector."""

    failures = 0

    def _fail(self):
        if self.failures:
            self.failures -= 1
            raise BufferError("connection refused")

    async def tickets(self, *args, **kwargs):
        self._fail()
        return await super().tickets(*args, **kwargs)

    async def put(self, *args, **kwargs):
        answer = await super().put(*args, **kwargs)
        self._fail()  # done, but the reply is lost
        return answer

    async def beat(self, *args, **kwargs):
        self._fail()
        return await super().beat(*args, **kwargs)


async def test_an_outage_of_the_store_loses_nothing(kit, monkeypatch):
    monkeypatch.setattr("asyncrl.buffers.patience.FIRST_PAUSE_S", 0.01)
    recipe = kit.recipe()
    buffer = kit.buffer(recipe, Outage)
    learner = kit.learner(buffer)
    async with kit.collecting(recipe, buffer):
        await learner.start()
        for _ in range(6):
            buffer.failures = 5
            await learner.step()
    stats = await buffer.stats()
    assert stats.states[State.TRAINED] == 12
    assert stats.refused_puts == 0


async def test_an_outage_longer_than_the_limit_ends_the_collector_with_the_stores_words(kit, monkeypatch):
    monkeypatch.setattr("asyncrl.buffers.patience.FIRST_PAUSE_S", 0.01)
    recipe = kit.recipe(run={"no_progress_s": 0.2})
    buffer = kit.buffer(recipe, Outage)
    buffer.failures = 10**9
    with pytest.raises(BufferError, match="connection refused"):
        async with kit.collecting(recipe, buffer) as task:
            await asyncio.wait({task}, timeout=kit.limit_s)


async def test_nothing_to_do_for_too_long_ends_the_collector_and_says_what_it_waited_for(kit):
    recipe = kit.recipe(run={"no_progress_s": 0.3})
    with pytest.raises(CollectorError, match=r"no weights to serve \(none were announced"):
        async with kit.collecting(recipe, kit.buffer(recipe, member_timeout_s=0.4)) as task:
            await asyncio.wait({task}, timeout=kit.limit_s)


# --- weights --------------------------------------------------------------------------------------------------------


async def test_a_new_lineage_of_a_lower_version_is_taken_and_dead_work_is_ended(kit):
    recipe = kit.recipe()
    buffer = kit.buffer(recipe)
    learner = kit.learner(buffer)
    async with kit.collecting(recipe, buffer) as task:
        await learner.start()
        for _ in range(3):
            await learner.step()
        await buffer.checkpointed(1, 1)
        await kit.until(lambda: (m := buffer.model.members.get("c0-1")) and m.serving == Weights(1, 3), task)
        resumed = kit.learner(buffer)
        await resumed.start(Weights(1, 1))
        assert resumed.weights == (2, 1)
        for _ in range(5):
            await resumed.step()
        await kit.until(lambda: buffer.model.members["c0-1"].serving == Weights(2, 6), task)
    assert (await buffer.stats()).states[State.TRAINED] == 12


async def test_requests_with_tokens_of_dead_weights_are_cancelled_at_once(kit):
    """Groups that would take 100 s are generated again; those sampled before the fork only go on."""
    recipe = kit.recipe(collector={"engine": {"type": "simulated", "slots": 8, "token_s": 1.0, "cv": 0.0}})
    buffer = kit.buffer(recipe)
    learner = kit.learner(buffer)
    async with kit.collecting(recipe, buffer) as task:
        await learner.start()
        await kit.until(lambda: buffer.model.next_ordinal == 4, task)
        resumed = kit.learner(buffer)
        await resumed.start(Weights(1, 0))
        await kit.until(lambda: buffer.model.members["c0-1"].serving == Weights(2, 0), task)
        assert [ticket.attempt for ticket in buffer.model.all.values()] == [0] * 4  # all of (1, 0): ancestors
        again = kit.learner(buffer)
        buffer.model.version = 1  # as if a step had been committed, and then a checkpoint of (1, 0) was resumed
        resumed.weights = Weights(2, 1)
        await resumed.announce()
        await kit.until(lambda: buffer.model.members["c0-1"].serving == Weights(2, 1), task)
        await again.start(Weights(1, 0))
        await kit.until(lambda: buffer.model.members["c0-1"].serving == Weights(3, 0), task)
        await kit.until(lambda: [t.attempt for t in buffer.model.all.values()] == [1] * 4, task)


async def test_weights_that_cannot_be_had_are_reported_and_the_old_ones_go_on_serving(kit):
    recipe = kit.recipe(weights={"deadline_s": 0.3})
    buffer = kit.buffer(recipe, member_timeout_s=0.4)
    learner = kit.learner(buffer)
    async with kit.collecting(recipe, buffer) as task:
        await learner.start()
        offers = [{"transport": "pigeon", "lineage": 1, "version": 1}]
        learner.publish = lambda weights: {"place": to_builtins(here()), "offers": offers}
        await learner.step()

        def reported():
            member = buffer.model.members["c0-1"]
            return "offered are pigeon 1/1" in member.info["weights"]["error"] and member.serving == Weights(1, 0)

        await kit.until(reported, task)
        learner.publish = lambda weights: {"transport": "none"}
        for _ in range(5):
            await learner.step()
        assert buffer.model.members["c0-1"].info["weights"]["error"] == ""


# --- engines --------------------------------------------------------------------------------------------------------


@pytest.fixture
def engines(monkeypatch):
    """Every simulated engine that is built, and fast restarts."""
    made = []

    class Kept(simulated.SimulatedEngine):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(simulated, "SimulatedEngine", Kept)
    monkeypatch.setattr(fleet, "FIRST_BACKOFF_S", 0.01)
    return made


async def test_a_failed_engine_returns_its_tickets_and_is_started_again(kit, engines):
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
    assert max(ticket.losses for ticket in buffer.model.all.values()) == 1


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


# --- filters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("age", [0, 1])
async def test_groups_without_variance_are_left_out_and_others_take_their_place(kit, age):
    recipe = kit.recipe(buffer={"dynamic_sampling": True, "max_trajectory_age": age})
    buffer = kit.buffer(recipe)
    learner = kit.learner(buffer)
    async with kit.collecting(recipe, buffer):
        await learner.start()
        for _ in range(6):
            for batch in await learner.step():
                assert sorted(batch.column("reward").to_pylist()) == [0.0, 1.0]
    stats = await buffer.stats()
    filtered = stats.reasons["filtered/zero_variance"]
    assert filtered >= 2  # of two coin tosses each, in the first twelve groups at least
    assert stats.states[State.FILTERED] == filtered
    assert 0 <= stats.lost_reward["filtered/zero_variance"] <= 1
    assert stats.lost_reward["trained/trained"] == 0.5
    assert stats.lost_length["filtered/zero_variance"] > 0
    assert stats.lost_seconds["filtered/zero_variance"] > 0
    assert ledger_problems(*(await buffer.snapshot()), buffer.limits) == []


async def test_without_dynamic_sampling_the_same_groups_are_trained(kit):
    """Negative control of the test above."""
    recipe = kit.recipe()
    buffer = kit.buffer(recipe)
    learner = kit.learner(buffer)
    async with kit.collecting(recipe, buffer):
        await learner.start()
        batches = [batch for _ in range(6) for batch in await learner.step()]
    assert any(len(set(batch.column("reward").to_pylist())) == 1 for batch in batches)
    assert (await buffer.stats()).states[State.FILTERED] == 0


# --- evaluation -----------------------------------------------------------------------------------------------------


async def _evaluate_while_weights_change(kit):
    engine = {"type": "simulated", "slots": 8, "token_s": 0.001, "mean_tokens": 300.0, "cv": 0.0}
    recipe = kit.recipe(collector={"engine": engine})
    buffer = kit.buffer(recipe)
    learner = kit.learner(buffer)
    async with kit.collecting(recipe, buffer) as task:
        await learner.start()
        await buffer.request_evaluation({"id": "eval-1-0", "weights": [1, 0], "prompts": 4, "samples": 3})
        await kit.until(lambda: buffer.model.evaluation_claim == "c0-1", task)
        buffer.model.version = 1
        learner.weights = Weights(1, 1)
        await learner.announce()
        async with asyncio.timeout(kit.limit_s):
            while (result := await buffer.evaluation("eval-1-0", wait_s=0.1)) is None:
                if task.done():
                    task.result()
        await kit.until(lambda: buffer.model.members["c0-1"].serving == Weights(1, 1), task)
        return result


async def test_an_evaluation_holds_the_weights_it_evaluates(kit):
    result = await _evaluate_while_weights_change(kit)
    assert result["weights"] == [1, 0]
    assert (result["n"], result["unscored"]) == (3, 0)  # one held-out row, three samples
    assert result["success"] == sum(answer["reward"] for answer in result["answers"]) / 3
    assert set(result["answers"][0]) == {"row_id", "prompt", "answer", "expected", "reward", "failure", "finish_reason"}


async def test_without_the_hold_an_evaluation_would_mix_weights(kit, monkeypatch):
    """Negative control of the test above."""

    class Open:
        async def __aenter__(self):
            return None

        async def __aexit__(self, *error):
            return None

    init = Updates.__init__

    def unheld(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.hold = Open()

    monkeypatch.setattr(Updates, "__init__", unheld)
    with pytest.raises(CollectorError, match=r"an answer has tokens of \[\(1, 1\)\]"):
        await _evaluate_while_weights_change(kit)


async def test_an_evaluation_of_weights_to_come_waits_for_them(kit):
    recipe = kit.recipe()
    buffer = kit.buffer(recipe)
    learner = kit.learner(buffer)
    async with kit.collecting(recipe, buffer):
        await learner.start()
        for _ in range(6):
            await learner.step(announce=False)
            if learner.weights.version == 6:
                await buffer.request_evaluation({"id": "last", "weights": [1, 6], "prompts": 1, "samples": 1})
                assert await buffer.evaluation("last", wait_s=0.05) is None
            await learner.announce()
        result = await buffer.evaluation("last", wait_s=kit.limit_s)
        assert result is not None
        assert result["n"] == 1
