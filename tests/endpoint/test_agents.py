"""Agents in real processes: what comes of each way in which one can end, and that the others go on."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from asyncrl.collectors import agents
from asyncrl.collectors.agents import AgentPlayer
from asyncrl.collectors.endpoint.server import Endpoint
from asyncrl.collectors.endpoint.session import Model
from asyncrl.collectors.engines.base import EngineError, Sampling
from asyncrl.collectors.episode import Episode, EpisodeLost
from asyncrl.collectors.rollout import Prompt
from asyncrl.collectors.segments import trajectories
from asyncrl.environments.processes import Processes
from asyncrl.rewards.pool import VerifierPool
from asyncrl.rewards.scoring import Scoring
from asyncrl.tasks.base import Row, TaskError
from tests.endpoint.conftest import END, TOKENIZER, Policy

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.faults]

AGENT = '''
import asyncio, json, math, os, signal, subprocess, sys, threading, time, urllib.error, urllib.request

NUMBER = 0  # what an episode leaves behind would be seen here


async def ask(endpoint, text, **arguments):
    answer = await endpoint.client().chat.completions.create(
        model="policy", messages=[{"role": "user", "content": text}], **arguments
    )
    return answer.choices[0].message.content


def post(endpoint, text, key=None):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": f"Bearer {key or endpoint.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{endpoint.base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def run(row, endpoint):
    """Whichever the row is for."""
    return globals()[row.info["agent"]](row, endpoint)


async def good(row, endpoint):
    return float(await ask(endpoint, row.prompt) == row.answer)


def plain(row, endpoint):
    return post(endpoint, row.prompt) == row.answer


async def twice(row, endpoint):
    first = await ask(endpoint, row.prompt)
    messages = [
        {"role": "user", "content": row.prompt},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "again"},
    ]
    answer = await endpoint.client().chat.completions.create(model="policy", messages=messages)
    return float(answer.choices[0].message.content == "niaga")


async def beside(row, endpoint):
    return sum([len(text) for text in await asyncio.gather(*(ask(endpoint, "ab") for _ in range(4)))]) / 8


def keeps(row, endpoint):
    global NUMBER
    NUMBER += 1
    post(endpoint, "x")
    return NUMBER


def environment(row, endpoint):
    post(endpoint, "x")
    told = (os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    return float(told == (endpoint.base_url, endpoint.api_key))


async def raises(row, endpoint):
    await ask(endpoint, "x")
    raise ZeroDivisionError("an agent's")


async def gives_up(row, endpoint):
    await ask(endpoint, "x")
    sys.exit(3)


async def nothing(row, endpoint):
    await ask(endpoint, "x")


async def not_a_number(row, endpoint):
    await ask(endpoint, "x")
    return math.nan


async def rubbish(row, endpoint):
    await ask(endpoint, "x")
    return ["good", "bad"]


async def silent(row, endpoint):
    return 1.0


async def never_answers(row, endpoint):
    await ask(endpoint, "x")
    while True:
        pass


async def waits_for_ever(row, endpoint):
    await ask(endpoint, "x")
    await asyncio.Event().wait()


def dies(row, endpoint):
    post(endpoint, "x")
    print("my last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def floods(row, endpoint):
    while True:
        try:
            post(endpoint, "x")
        except urllib.error.HTTPError:
            pass


def stops_at_the_limit(row, endpoint):
    for n in range(100):
        try:
            post(endpoint, "x")
        except urllib.error.HTTPError as error:
            assert error.code == 403, error.code
            return n / 10


def wrong_key(row, endpoint):
    post(endpoint, "x")
    try:
        post(endpoint, "x", key="sk-of-another")
    except urllib.error.HTTPError as error:
        return float(error.code == 401)


def leaves_processes(row, endpoint):
    post(endpoint, "x")
    pids = [subprocess.Popen(["sleep", "600"], start_new_session=n > 0).pid for n in range(2)]
    open(row.answer, "w").write(json.dumps(pids))
    return 1.0


def calls_after_its_end(row, endpoint):
    """What it leaves behind goes on calling; it is killed, and its key is good for nothing."""
    post(endpoint, "x")
    if os.fork() == 0:
        os.setsid()
        while True:
            try:
                post(endpoint, "late")
            except urllib.error.HTTPError:
                pass
    return 1.0


def leaves_a_call(row, endpoint):
    """Its reward is there while a call of its own still runs."""
    post(endpoint, "x")
    threading.Thread(target=post, args=(endpoint, "slow"), daemon=True).start()
    while not os.path.exists(row.answer):
        time.sleep(0.01)
    return 1.0


def prints(row, endpoint):
    post(endpoint, "x")
    for _ in range(200):
        print("x" * 100_000)
    return 1.0


async def hangs_up(row, endpoint):
    client = endpoint.client(timeout=0.1)
    try:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "slow"}])
    except Exception:
        pass
    return float(await ask(endpoint, row.prompt) == row.answer)
'''

COMMAND = """
import json, os, sys, urllib.request

row = json.load(sys.stdin)
assert row == json.loads(os.environ["ASYNCRL_ROW"])
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": [{"role": "user", "content": row["prompt"]}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
answer = json.load(urllib.request.urlopen(request, timeout=10))["choices"][0]["message"]["content"]
print("some words")
exec(row["info"]["agent"])
"""
FAST = 20.0


@dataclass
class Parts:
    """What players share: a test has one of its own, with limits of its own."""

    endpoint: Endpoint
    processes: Processes
    pools: dict[bool, Scoring]

    def player(self, *, seconds: float = FAST, calls: int = 8, scores: bool = False) -> AgentPlayer:
        return AgentPlayer(
            self.endpoint,
            self.processes,
            self.pools[scores],
            Model(TOKENIZER, (END,), 512, "hermes"),
            calls=calls,
            seconds=seconds,
            at_once=50,
            scores=scores,
        )

    async def play(self, agent, policy=None, *, row=None, times=1, **options):
        """The episodes of `times` plays at once, or what they raised."""
        player, row = self.player(**options), row or Row("row", "abc", "cba")
        row = dataclasses.replace(row, info={"agent": agent})
        async with asyncio.timeout(60):
            made = [episode_of(row, n) for n in range(times)]
            return await asyncio.gather(*(player.play(e, policy or Policy()) for e in made), return_exceptions=True)


def episode_of(row: Row, number: int = 0) -> Episode:
    return Episode(Prompt(row, (1,), "agent"), f"{number}.1", "run/0", number, 1, 0, Sampling(max_tokens=64))


@asynccontextmanager
async def started(folder: Path, endpoint: Endpoint | None = None, **task: object) -> AsyncIterator[Parts]:
    (folder / "agents_of_a_test.py").write_text(AGENT)
    (folder / "train.jsonl").write_text('{"prompt": "abc", "answer": "cba"}\n')
    config = {"type": "agent", "data": {"train": str(folder / "train.jsonl")}, **task}
    pools = {
        scores: Scoring(
            VerifierPool(
                "asyncrl.tasks.scorer:scorer",
                {"task": {**config, "rewards": [{"type": "exact"}] if scores else []}, "seed": 0, "max_tokens": 64},
                workers=1,
            ),
            timeout_s=10.0,
        )
        for scores in (False, True)
    }
    parts = Parts(endpoint or Endpoint(), Processes("asyncrl.environments.agent:host", {"task": config}), pools)
    players = [parts.player(scores=scores) for scores in pools]
    try:
        await players[0].start()
        await pools[True].start()
        yield parts
    finally:
        await players[0].close()
        await pools[True].close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def functions(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Parts]:
    folder = tmp_path_factory.mktemp("agents")
    sys.path.append(str(folder))
    async with started(folder, agent="agents_of_a_test:run") as parts:
        yield parts
    sys.path.remove(str(folder))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def commands(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Parts]:
    folder = tmp_path_factory.mktemp("commands")
    (folder / "program.py").write_text(COMMAND)
    async with started(folder, command=[sys.executable, str(folder / "program.py")]) as parts:
        yield parts


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


# --- commands ---------------------------------------------------------------------------------------------------------

GOOD = 'print(json.dumps({"right": float(answer == row["answer"])}))'


async def test_a_command_is_an_agent_and_its_last_line_the_reward(commands):
    for episode in await commands.play(GOOD, times=2):
        assert (episode.score.reward, episode.score.parts) == (1.0, {"right": 1.0})


COMMAND_FAULTS = [
    ("sys.exit(3)", "agent_raised", "exit code 3"),
    ("print('well done')", "agent_invalid", "last line is 'well done'"),
    ("print('null')", "agent_none", "no reward"),
    ("print('NaN')", "agent_nan", "NaN"),
    ("os.kill(os.getpid(), 9)", "agent_raised", "exit code -9"),
]


@pytest.mark.parametrize(("end", "failure", "said"), COMMAND_FAULTS, ids=[said for *_, said in COMMAND_FAULTS])
async def test_a_command_that_fails_has_a_name(commands, end, failure, said):
    (episode,) = await commands.play(end)
    assert (episode.score.failure, len(episode.turns)) == (failure, 1)
    assert said in episode.info["error"]
