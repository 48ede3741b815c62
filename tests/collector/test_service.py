"""The collector with the in-process buffer and simulated engines: tickets, outages, weights, filters."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import to_builtins

from asyncrl.buffers.audit import ledger_problems
from asyncrl.buffers.base import BufferError, Member, State
from asyncrl.buffers.memory import MemoryBuffer
from asyncrl.collectors.engines import simulated
from asyncrl.collectors.fleet import CollectorError
from asyncrl.collectors.scoring import SimulatedScorer
from asyncrl.rewards.scoring import Score
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


async def test_groups_that_shaping_alone_tells_apart_are_left_out_and_known_to_be_all_right(kit, monkeypatch):
    """Every second prompt is solved by both answers, whose penalties differ."""

    async def score(self, prompt, completion, *, ticket, member):
        right = float(ticket % 2 == 0 or member == 0)
        return Score({"right": right, "overlong": -0.5 * member}, right - 0.5 * member, "", plain=right)

    monkeypatch.setattr(SimulatedScorer, "score", score)
    recipe = kit.recipe(buffer={"dynamic_sampling": True})
    buffer = kit.buffer(recipe)
    learner = kit.learner(buffer)
    async with kit.collecting(recipe, buffer):
        await learner.start()
        batches = [batch for _ in range(3) for batch in await learner.step()]
    assert all(batch.column("ticket")[0].as_py() % 2 == 1 for batch in batches)
    assert sorted(batches[0].column("reward").to_pylist()) == [-0.5, 1.0]
    stats = await buffer.stats()
    assert stats.reasons["filtered/zero_variance"] >= 3
    assert stats.lost_reward["filtered/zero_variance"] == 1.0, "which says that prompts have nothing left to teach"


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
