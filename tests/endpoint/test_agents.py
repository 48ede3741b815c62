"""Agents in real processes: what comes of each way in which one can end, and that the others go on."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from asyncrl.collectors import agents
from asyncrl.collectors.endpoint.server import Endpoint
from asyncrl.collectors.engines.base import EngineError
from asyncrl.collectors.episode import EpisodeLost
from asyncrl.collectors.segments import trajectories
from asyncrl.tasks.base import Row, TaskError
from tests.endpoint.conftest import Policy
from tests.endpoint.played_agents import Parts, episode_of, started

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.faults]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def functions(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Parts]:
    folder = tmp_path_factory.mktemp("agents")
    sys.path.append(str(folder))
    async with started(folder, agent="agents_of_a_test:run") as parts:
        yield parts
    sys.path.remove(str(folder))


@pytest.mark.parametrize(
    ("agent", "reward", "turns"),
    [
        ("good", 1.0, 1),
        ("plain", 1.0, 1),
        ("twice", 1.0, 2),
        ("beside", 1.0, 4),
        ("environment", 1.0, 1),
        ("wrong_key", 1.0, 1),
    ],
)
async def test_a_reward_is_all_that_an_agent_returns(functions, agent, reward, turns):
    (episode,) = await functions.play(agent)
    assert (episode.score.reward, episode.score.failure, len(episode.turns)) == (reward, "", turns)
    rows = trajectories(episode)
    assert all(row.reward == reward and row.info["calls"] == turns for row in rows)
    assert len(rows) == (4 if agent == "beside" else 1)


async def test_nothing_that_an_episode_changes_is_seen_by_the_next(functions):
    episodes = await functions.play("keeps", times=8)
    assert {episode.score.reward for episode in episodes} == {1.0}


async def test_an_agent_without_a_reward_has_its_last_answer_scored_if_the_task_can(functions):
    row = Row("row", "abc", "x")
    (scored,) = await functions.play("nothing", scores=True, row=row)
    (unscored,) = await functions.play("nothing", scores=False, row=row)
    assert (scored.score.reward, unscored.score.failure) == (1.0, "agent_none")
    assert (scored.score.asked, unscored.score.asked) == (True, False), "an agent's fault is no verifier's"


FAULTS = [
    ("raises", "agent_raised", "ZeroDivisionError: an agent's"),
    ("gives_up", "agent_raised", "SystemExit: 3"),
    ("nothing", "agent_none", "returned no reward"),
    ("not_a_number", "agent_nan", "is NaN"),
    ("rubbish", "agent_invalid", "returned 2 values"),
    ("silent", "agent_no_call", "nothing to train"),
    ("dies", "agent_died", "my last words"),
]


@pytest.mark.parametrize(("agent", "failure", "detail"), FAULTS, ids=[agent for agent, *_ in FAULTS])
async def test_a_fault_of_an_agent_has_a_name_and_is_never_a_reward(functions, agent, failure, detail):
    for episode in await functions.play(agent, times=2):
        assert episode.score.failure == failure
        assert math.isnan(episode.score.reward)
        assert episode.turns
        (row,) = trajectories(episode)
        assert math.isnan(row.reward)
        assert detail in row.info["error"]
        assert row.loss_mask.any() == (agent != "silent")


@pytest.mark.parametrize("agent", ["never_answers", "waits_for_ever"])
async def test_an_agent_that_does_not_end_is_ended(functions, agent):
    (episode,) = await functions.play(agent, seconds=2.0)
    assert (episode.score.failure, len(episode.turns)) == ("agent_timeout", 1)


async def test_an_agent_that_calls_on_and_on_is_ended(functions):
    (episode,) = await functions.play("floods", calls=3)
    assert (episode.score.failure, len(episode.turns), episode.info["ended_by"]) == ("agent_flood", 3, "max_turns")


async def test_an_agent_that_heeds_the_limit_keeps_its_reward(functions):
    """The control of the test above."""
    (episode,) = await functions.play("stops_at_the_limit", calls=3)
    assert (episode.score.reward, len(episode.turns), episode.info["ended_by"]) == (0.3, 3, "max_turns")


async def test_what_an_agent_prints_fills_nothing(functions):
    (episode,) = await functions.play("prints")
    assert episode.score.reward == 1.0


async def test_what_an_agent_started_ends_with_it(functions, tmp_path, is_alive, eventually):
    started = tmp_path / "pids"
    (episode,) = await functions.play("leaves_processes", row=Row("row", "abc", str(started)))
    assert episode.score.reward == 1.0
    assert eventually(10, lambda: not any(map(is_alive, json.loads(started.read_text()))))


async def test_what_is_left_of_an_agent_gets_no_answer(functions):
    policy = Policy()
    (episode,) = await functions.play("calls_after_its_end", policy=policy)
    asked = len(policy.requests)
    await asyncio.sleep(0)
    assert episode.score.reward == 1.0
    assert len(policy.requests) == asked


async def test_a_call_that_runs_when_the_agent_has_returned_is_not_in_the_record(functions, tmp_path):
    class Slow(Policy):
        async def generate(self, request):
            if len(self.requests) == 1:
                (tmp_path / "called").touch()
                self.gate = asyncio.Event()  # for ever
            return await super().generate(request)

    policy = Slow()
    (episode,) = await functions.play("leaves_a_call", policy, row=Row("row", "abc", str(tmp_path / "called")))
    assert (episode.score.reward, len(episode.turns)) == (1.0, 1)
    assert policy.cancelled.is_set()


async def test_a_call_that_the_agent_gave_up_is_not_in_the_record(functions):
    class Slow(Policy):
        async def generate(self, request):
            if len(self.requests) == 0:
                self.requests.append(request)
                await asyncio.Event().wait()
            return await super().generate(request)

    (episode,) = await functions.play("hangs_up", policy=Slow())
    assert (episode.score.reward, len(episode.turns)) == (1.0, 1)


async def test_a_lost_engine_is_the_engines_fault_whatever_the_agent_returns(functions):
    def write(request):
        raise EngineError("out of memory")

    (error,) = await functions.play("good", policy=Policy(write))
    assert isinstance(error, EngineError)


async def test_an_episode_whose_processes_are_gone_is_played_again(functions):
    policy, player, row = Policy(gate=asyncio.Event()), functions.player(), Row("row", "abc", "cba", {"agent": "good"})
    async with asyncio.timeout(60):
        lost = asyncio.ensure_future(player.play(episode_of(row), policy))
        await policy.asked.wait()
        functions.processes._zygote._process.kill()
        with pytest.raises(EpisodeLost) as caught:
            await lost
        assert caught.value.reason == agents.LOST
        policy.gate.set()
        assert (await player.play(episode_of(row), policy)).score.reward == 1.0


async def test_cancelling_an_episode_ends_its_agent(functions, eventually, descendants):
    policy, player, row = Policy(gate=asyncio.Event()), functions.player(), Row("row", "abc", "cba", {"agent": "good"})
    async with asyncio.timeout(60):
        before = len(descendants(os.getpid()))
        work = asyncio.ensure_future(player.play(episode_of(row), policy))
        await policy.asked.wait()
        assert len(descendants(os.getpid())) == before + 1
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert policy.cancelled.is_set()
        assert eventually(10, lambda: len(descendants(os.getpid())) == before)


async def test_processes_of_agents_are_forked(functions):
    """What the warm-up of OpenAI's package leaves behind are no threads, with which each process would start anew."""
    await functions.processes.start()
    assert functions.processes._zygote._threads == 1


async def test_an_address_that_cannot_be_had_is_an_error_at_the_start(functions, tmp_path):
    taken = Endpoint(port=functions.endpoint._port)
    with pytest.raises(TaskError, match=r"cannot be listened to.*\n.*collector.endpoint.port 0"):
        async with started(tmp_path, taken, command=["true"]):
            pass


async def test_an_agent_that_is_not_there_is_an_error_at_the_start(tmp_path):
    with pytest.raises(TaskError, match="no module agents_of_nobody"):
        async with started(tmp_path, agent="agents_of_nobody:run"):
            pass
