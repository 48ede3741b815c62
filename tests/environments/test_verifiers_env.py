"""Environments of the real package verifiers that are played: a harness calls the endpoint, rewards come back."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins

from asyncrl.config.convert import convert
from asyncrl.environments.verifiers import VerifiersHost, host
from asyncrl.tasks.base import Row, TaskError
from asyncrl.tasks.build import build_task
from tests.processes import Start

Write = Callable[[str, str], str]

TALK = """
import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["Numbers", "Talk"]

class Data(vf.TaskData):
    answer: str

class Number(vf.Task[Data]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def turns(self, trace) -> float:
        return trace.num_turns

class Numbers(vf.Taskset[Number, vf.TasksetConfig]):
    def load(self):
        return [Number(Data(prompt=f"reverse {n}", answer=str(n)[::-1]), self.config.task) for n in range(100, 200)]

class Config(vf.HarnessConfig):
    turns: int = 2

class Talk(vf.Harness[Config]):
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
        messages = [{"role": "user", "content": data.prompt}]
        for _ in range(self.config.turns):
            answer = await client.chat.completions.create(model=ctx.model, messages=messages)
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}]
            messages += [{"role": "user", "content": "once more"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
"""


class Provider:
    """A server that answers each question with its digits backwards. asked: (path, key, body) of every call."""

    def __init__(self, status: int) -> None:
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                provider.asked.append((self.path, self.headers["authorization"], body))
                said = body["messages"][0]["content"].removeprefix("reverse ")[::-1]
                choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
                answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}
                sent = json.dumps(answer if status == 200 else {"error": {"message": "no"}}).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(sent)))
                self.end_headers()
                self.wfile.write(sent)

            def log_message(self, format: str, *args: object) -> None:
                return None

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture(params=[200])
def provider(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    found = Provider(request.param)
    yield found
    found.server.shutdown()


def played(environment: str, **env: Any) -> tuple[VerifiersHost, Row]:
    section = {"type": "verifiers", "environment": environment, "env": env}
    task = build_task(convert({"task": section}).task, seed=0)
    return host(section), task.rows("train")[0]


def test_a_harness_calls_the_endpoint_with_the_key_of_its_episode_and_rewards_come_back(
    write_module: Write, provider: Provider
) -> None:
    hosted, row = played(write_module("talk", TALK))
    parts = {"right": 1.0, "turns": 2.0}
    assert hosted.run(to_builtins(row), provider.url, "sk-1") == {"parts": parts, "failure": "", "detail": ""}
    assert [(path, key) for path, key, _ in provider.asked] == [("/v1/chat/completions", "Bearer sk-1")] * 2
    assert [message["content"] for message in provider.asked[1][2]["messages"]] == [
        row.prompt[0]["content"],  # type: ignore[index]
        row.answer,
        "once more",
    ]


def test_the_recipe_configures_harness_and_limits(write_module: Write, provider: Provider) -> None:
    hosted, row = played(write_module("talk", TALK), agent={"harness": {"id": "talk", "turns": 5}, "max_turns": 3})
    assert hosted.run(to_builtins(row), provider.url, "sk-1")["parts"]["turns"] == 3
    with pytest.raises(TaskError, match=r"task.env.agent.max_turn is 3: Extra inputs are not permitted"):
        played("talk", agent={"max_turn": 3})


@pytest.mark.parametrize("provider", [400], indirect=True)
def test_an_episode_whose_calls_fail_has_no_score(write_module: Write, provider: Provider) -> None:
    hosted, row = played(write_module("talk", TALK))
    with pytest.raises(RuntimeError, match=r"ProviderError"):
        hosted.run(to_builtins(row), provider.url, "sk-1")


def test_an_episode_of_two_agents_is_refused(write_module: Write, provider: Provider) -> None:
    both = TALK.replace('"Talk"]', '"Talk", "Both"]') + (
        "\nclass Both(vf.SingleAgentEnv):\n"
        "    async def run(self, task, agents):\n"
        "        await agents.agent.run(task)\n"
        "        await agents.agent.run(task)\n"
    )
    hosted, row = played(write_module("both", both))
    with pytest.raises(ValueError, match="the episode has 2 traces: only one agent can be trained"):
        hosted.run(to_builtins(row), provider.url, "sk-1")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_is_played_through_the_collectors_endpoint_is_trained(begin: Start, tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(TALK)
    (tmp_path / "mine.yaml").write_text(
        "run: {name: talk, output_dir: out, max_steps: 2}\n"
        "task: {type: verifiers, environment: talk, env: {}}\n"
        "collector: {group_size: 4, max_turns: 2}\n"
        "learner: {groups_per_step: 2}\n"
        "eval: {at_start: false, at_end: false}\n"
    )
    process = begin("run", "./mine.yaml")
    _, errors = process.communicate(timeout=250)
    assert process.returncode == 0, errors
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step" in line and "reward_part/turns" in line]
    assert [line["reward_part/turns"] for line in steps] == [2.0, 2.0]
