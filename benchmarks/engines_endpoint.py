"""`engines`, the endpoint: what a call costs beside the engine's own time, with 200 episodes at once.

The engine is a clock: each answer takes half a second to one and a half, and is ready made. The agents are in a process
of their own; each has a conversation that grows. A call's own time is the CPU time of the endpoint's process by call,
since on a machine with others on it a wait is theirs too. The rows also have what a client waits less what the engine
took.

Beside it: a server of the same library that only reads and sends JSON of the same size, and, as control, the endpoint
with 3 ms of work more in each call, which must miss the target.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import uvloop
from aiohttp import web

from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.collectors.endpoint.server import Endpoint
from asyncrl.collectors.endpoint.session import Model, Session
from asyncrl.collectors.engines.base import Completion, Request, Sampling, Span
from asyncrl.collectors.episode import Episode, Sampler
from asyncrl.collectors.rollout import Prompt
from asyncrl.staleness import Weights
from asyncrl.tasks.base import Row as TaskRow

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from transformers import PreTrainedTokenizerBase

EPISODES = 200
MESSAGE = 400  # characters, and with a byte a token also tokens, of each message of the agent's
ANSWER = 100  # tokens
ENGINE_S = (0.5, 1.5)
TARGET_MS = 2.0
CONTROL_S = 0.003
LIMIT_S = 120.0


def measure(*, quick: bool, say: Say) -> Measured:
    """The rows, and the target for a call."""
    turns = 4 if quick else 12
    kinds: dict[str, float | None] = {"endpoint": 0.0, "echo": None, "control": CONTROL_S}
    rows: list[Row] = []
    for kind, work_s in kinds.items():
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the collector's loop
            rows.append({"part": "endpoint", "server": kind, **runner.run(_measured(turns, work_s))})
        say(f"endpoint: {kind}: {rows[-1]['cpu_ms']} ms a call; waits {rows[-1]['wait_ms_median']} ms in the median")
    own = {row["server"]: row["cpu_ms"] for row in rows}
    return Measured(
        rows,
        [
            Target(f"endpoint: ms a call, {EPISODES} episodes at once", own["endpoint"], TARGET_MS, "lower"),
            Target("endpoint: control, ms a call with 3 ms more work", own["control"], TARGET_MS, "higher"),
        ],
    )


async def _measured(turns: int, work_s: float | None) -> Row:
    """work_s: beside the endpoint's own, of each call; None: an echo instead of the endpoint."""
    engine = _Clock(work_s or 0.0)
    async with _echo(engine) if work_s is None else _endpoint(engine) as (url, keys):
        began = time.process_time()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", __name__), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(LIMIT_S):
            output, _ = await process.communicate(json.dumps({"url": url, "keys": keys, "turns": turns}).encode())
        cpu_s = time.process_time() - began
    waited: dict[str, float] = json.loads(output)
    waits = sorted(1000 * (seconds - engine.took[id]) for id, seconds in waited.items())
    return {
        "episodes": len(keys),
        "calls": len(waits),
        "wait_ms_median": round(statistics.median(waits), 3),
        "wait_ms_p99": round(waits[int(0.99 * len(waits))], 3),
        "cpu_ms": round(1000 * cpu_s / len(waits), 3),
    }


class _Clock(Sampler):
    """Answers after a while. took: by the id that its client reads, the seconds from the question on."""

    def __init__(self, work_s: float) -> None:
        self.took: dict[str, float] = {}
        self._work_s = work_s
        self._random = random.Random(0)

    async def generate(self, request: Request) -> Completion:
        """See Sampler."""
        turn = request.id.partition("/")[2] or "0"
        await self.answer(f"chatcmpl-{request.session}-{turn}")
        return Completion(
            token_ids=np.full(ANSWER, ord("a"), np.int32),
            logprobs=np.full(ANSWER, -1.0, np.float32),
            versions=np.zeros(ANSWER, np.int32),
            spans=(Span(Weights(1, 0), 0, ANSWER, "00"),),
            finish_reason="length",
        )

    async def answer(self, id: str) -> None:
        began = time.perf_counter()
        await asyncio.sleep(self._random.uniform(*ENGINE_S))
        self.took[id] = time.perf_counter() - began
        until = time.process_time() + self._work_s
        while time.process_time() < until:
            pass

    def partial(self, request_id: str) -> Completion | None:
        return None

    def listen(self, request_id: str, heard: Callable[[], None]) -> None:
        return None


@asynccontextmanager
async def _endpoint(engine: _Clock) -> AsyncIterator[tuple[str, list[str]]]:
    from asyncrl.learners.tiny_tokenizer import build_tokenizer

    tokenizer: PreTrainedTokenizerBase = build_tokenizer(1 << 20)
    model = Model(tokenizer, (int(tokenizer.eos_token_id),), None, "hermes")
    endpoint = Endpoint()
    await endpoint.start()
    try:
        yield endpoint.base_url, [endpoint.open(session) for session in _sessions(model, engine)]
    finally:
        await endpoint.close()


def _sessions(model: Model, engine: _Clock) -> Sequence[Session]:
    prompt = Prompt(TaskRow("row", "x"), (1,), "bench")
    made = [Episode(prompt, f"{n}.1", "bench/0", n, 1, 0, Sampling(max_tokens=ANSWER)) for n in range(EPISODES)]
    return [Session(episode, engine, model, calls=1000) for episode in made]


@asynccontextmanager
async def _echo(engine: _Clock) -> AsyncIterator[tuple[str, list[str]]]:
    """What the same library does with messages of the same size, without anything done with them."""
    count = 0

    async def chat(request: web.Request) -> web.Response:
        nonlocal count
        await request.json()
        count += 1
        id = f"chatcmpl-{count}"
        await engine.answer(id)
        message = {"role": "assistant", "content": "a" * ANSWER}
        return web.json_response({"id": id, "choices": [{"index": 0, "message": message}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", [str(n) for n in range(EPISODES)]
    finally:
        await runner.cleanup()


# --- the agents' process ----------------------------------------------------------------------------------------------


async def _agents(url: str, keys: Sequence[str], turns: int) -> dict[str, float]:
    """Seconds that each call waited, by the id of its answer."""
    waited: dict[str, float] = {}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:

        async def agent(key: str, delay_s: float) -> None:
            messages: list[dict[str, Any]] = []
            await asyncio.sleep(delay_s)  # all at once would be measured as a queue
            for turn in range(turns):
                messages.append({"role": "user", "content": f"{turn}".ljust(MESSAGE, "x")})
                body = json.dumps({"model": "policy", "messages": messages}).encode()
                headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
                began = time.perf_counter()
                async with http.post(f"{url}/chat/completions", data=body, headers=headers) as response:
                    answer = json.loads(await response.read())
                waited[answer["id"]] = time.perf_counter() - began
                messages.append(answer["choices"][0]["message"])

        await asyncio.gather(*(agent(key, ENGINE_S[1] * n / len(keys)) for n, key in enumerate(keys)))
    return waited


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(_agents(**json.load(sys.stdin)))))
