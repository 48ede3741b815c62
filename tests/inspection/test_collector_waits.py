"""What a collector says it waits for, one thing at a time."""

from __future__ import annotations

import asyncio
import time

import pytest

from asyncrl.buffers.limits import Limits
from asyncrl.buffers.memory import MemoryBuffer
from asyncrl.collectors.engines.base import Request, Sampling
from asyncrl.collectors.engines.simulated import SimulatedEngine
from asyncrl.collectors.entrance import EngineLost
from asyncrl.collectors.fleet import Fleet
from asyncrl.collectors.updates import Updates
from asyncrl.collectors.waits import STILL_S, waits_of
from asyncrl.config.convert import convert
from asyncrl.config.recipe import Recipe
from asyncrl.staleness import Weights
from asyncrl.weights.base import StagedWeights
from asyncrl.weights.reach import Choice, here

RECIPE = Recipe()
REQUEST = Request(id="r", group="r", session="r", token_ids=(1,), sampling=Sampling(), seed=0)


class Collector:
    """A collector's fleet and updates, without the tasks that move them."""

    def __init__(self) -> None:
        def engine() -> SimulatedEngine:
            return SimulatedEngine("c0/0", slots=4, token_s=0.01, mean_tokens=10.0, cv=1.0, seed=0)

        async def nothing() -> None:
            return None

        self.fleet = Fleet([engine])
        buffer = MemoryBuffer("r", Limits(max_age=1, groups_per_step=2, max_steps=9))
        self.updates = Updates(
            self.fleet,
            buffer,
            config=RECIPE.weights,
            me="c0-1",
            place=here(),
            drain_limit_s=300.0,
            store_limit_s=9.0,
            on_change=nothing,
        )
        self.scoring: list[float] = []
        self.answering: list[float] = []

    async def serve(self) -> None:
        (host,) = self.fleet.hosts
        await host.engine.start()
        await host.engine.stage(StagedWeights(Weights(1, 3), {}, {}, "ab"))
        await host.engine.activate("keep")

    def waits(self, recipe: Recipe = RECIPE) -> list[tuple[str, float, str]]:
        now = time.time()
        found = waits_of(recipe, self.fleet, self.updates, scoring=self.scoring, answering=self.answering)
        return [(wait["for"], round(now - wait["since"]), wait["by"]) for wait in found]


@pytest.fixture
def collector() -> Collector:
    return Collector()


@pytest.mark.asyncio
async def test_a_collector_that_serves_and_works_waits_for_nothing(collector):
    await collector.serve()
    assert collector.waits() == []


@pytest.mark.asyncio
async def test_one_without_weights_waits_for_a_learner(collector):
    collector.updates.began -= 70
    assert collector.waits() == [("weights, of which none were announced", 70, "a learner")]


@pytest.mark.asyncio
async def test_weights_on_their_way_are_named_with_their_phase(collector):
    await collector.serve()
    course, now = collector.updates.course, time.monotonic()
    course.first = Choice("collective", "another host")
    course.announced(Weights(1, 4), now - 20)
    assert collector.waits() == [
        ("the weights of lineage 1 version 4 to be offered over collective", 20, "the learner's sender, within 120 s")
    ]
    course.fetching(Weights(1, 4), now - 19)
    assert collector.waits() == [
        ("the weights of lineage 1 version 4 to arrive over collective", 19, "their transport, within 120 s")
    ]
    course.enter("activate", now - 18)
    assert collector.waits() == [
        (
            "the weights of lineage 1 version 4 to be activated",
            18,
            "the engine, between two decode steps, within 120 s",
        )
    ]
    course.enter("verify", now - 17)
    assert collector.waits() == [
        (
            "the weights of lineage 1 version 4 to be verified",
            17,
            "the engine, which hashes what it serves, within 120 s",
        )
    ]
    course.failed("checksum differs", now - 3)
    assert collector.waits() == [
        ("weights that it can take: checksum differs", 3, "the learner, which publishes the next")
    ]


@pytest.mark.asyncio
async def test_weights_that_wait_for_an_evaluation_or_for_running_requests_say_so(collector):
    await collector.serve()
    collector.updates.holding_since = time.monotonic() - 7
    assert collector.waits() == [("the end of an evaluation, to serve new weights", 7, "this collector's engines")]
    collector.updates.holding_since = None
    (host,) = collector.fleet.hosts
    running = asyncio.ensure_future(host.entrance.generate(host.engine, REQUEST))
    await asyncio.sleep(0)
    host.entrance.close()
    assert collector.waits() == [
        ("the end of 1 requests of engine c0/0, to serve new weights", 0, "the engine, within 120 s")
    ]
    host.entrance.open()
    running.cancel()
    await asyncio.wait({running})


@pytest.mark.asyncio
async def test_an_engine_that_failed_or_makes_no_token_is_named(collector):
    await collector.serve()
    (host,) = collector.fleet.hosts
    running = asyncio.ensure_future(host.entrance.generate(host.engine, REQUEST))
    await asyncio.sleep(0)
    assert collector.waits() == [], "a short pause is ordinary"
    host._moved_at -= STILL_S + 15
    assert collector.waits() == [
        ("a token of engine c0/0, which has 1 requests", 20, "the engine; it is started again after 300 s")
    ]
    collector.fleet.fail(host, host.engine, "out of memory")
    assert collector.waits() == [
        ("engine c0/0, which failed: out of memory", 0, "this collector, which starts it again")
    ]
    await asyncio.wait({running})
    assert isinstance(running.exception(), EngineLost)


@pytest.mark.asyncio
async def test_scores_that_do_not_come_are_named(collector):
    await collector.serve()
    collector.scoring = [time.monotonic() - 1, time.monotonic() - 2]
    assert collector.waits() == []
    collector.scoring.append(time.monotonic() - 30)
    assert collector.waits() == [("3 scores", 30, "the verifiers, within 10 s of work each")]


@pytest.mark.asyncio
async def test_environments_that_take_long_are_named_with_their_limit(collector):
    await collector.serve()
    recipe = convert({"task": {"type": "mine:Mine", "step_timeout_s": 40}})
    now = time.monotonic()
    collector.answering = [now - 1]
    assert collector.waits(recipe) == []
    collector.answering = [now - 1, now - 12]
    assert collector.waits(recipe) == [("2 environments", 12, "their processes, within 40 s of each step")]
