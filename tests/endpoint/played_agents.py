"""Agents to be played, one for each way in which one can end, and what plays them in real processes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from asyncrl.collectors.agents import AgentPlayer
from asyncrl.collectors.endpoint.server import Endpoint
from asyncrl.collectors.endpoint.session import Model
from asyncrl.collectors.engines.base import Sampling
from asyncrl.collectors.episode import Episode
from asyncrl.collectors.rollout import Prompt
from asyncrl.environments.processes import Processes
from asyncrl.rewards.pool import VerifierPool
from asyncrl.rewards.scoring import Scoring
from asyncrl.tasks.base import Row
from tests.endpoint.conftest import END, TOKENIZER, Policy

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
