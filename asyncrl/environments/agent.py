"""An agent of the user's in the process of its episode: a function, or a command.

Either finds the endpoint in `OPENAI_BASE_URL` and `OPENAI_API_KEY`, where OpenAI's clients and what is built on them
look. The process is the episode's own, so that what libraries keep for a process is kept for an episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

import msgspec

from asyncrl.config.convert import convert
from asyncrl.config.recipe import AgentTask
from asyncrl.environments.child import Unusable
from asyncrl.rewards.parts import judge
from asyncrl.tasks.agent import load_agent
from asyncrl.tasks.base import Row, TaskError

BASE_URL, API_KEY, ROW = "OPENAI_BASE_URL", "OPENAI_API_KEY", "ASYNCRL_ROW"

LARGEST_VARIABLE = 100_000  # bytes; Linux allows 128 KiB
KEPT_OUTPUT = 1 << 20  # bytes, the last ones, of what a command prints: its reward is there
WARM_UP_S = 30.0
LAST_WORDS_S = 2.0  # for output that is on its way when a command has ended; what it left behind may hold it open


@dataclass(frozen=True, slots=True)
class AgentEndpoint:
    """Where a function's calls go."""

    base_url: str
    api_key: str

    def client(self, **options: Any) -> Any:
        """An `openai.AsyncOpenAI` for it. options: its own, such as timeout. Raises ImportError without the package."""
        import openai

        # Plain HTTP, so that no certificates have to be read, which takes longer than all the rest.
        http = openai.DefaultAsyncHttpxClient(verify=False)
        return openai.AsyncOpenAI(
            base_url=self.base_url, api_key=self.api_key, **{"http_client": http, "max_retries": 0, **options}
        )


def host(task: dict[str, Any]) -> AgentHost:
    """task: the recipe's section, as plain values. Raises TaskError for an agent that cannot be loaded."""
    config = convert({"task": task}).task
    if not isinstance(config, AgentTask):
        raise TaskError(f"task.type {config.type} has no agent")
    if config.agent is None:
        return AgentHost(Command(config.command or []))
    agent = load_agent(config.agent)
    if importlib.util.find_spec("openai") is not None:
        before = threads()
        asyncio.run(warm_up())
        deadline = time.monotonic() + WARM_UP_S
        while threads() > before and time.monotonic() < deadline:  # one that has ended is not gone at once
            time.sleep(0.001)
    return AgentHost(agent)


def threads() -> int:
    """Of this process; one with several is not forked."""
    return len(os.listdir("/proc/self/task"))


async def warm_up() -> None:
    """Make a call, to a server that is here. OpenAI's package loads and builds most of itself at the first one: 0.4 s,
    which each of the processes that are forked from this one would take again."""
    choice = {"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": "stop"}
    answer = {"id": "", "object": "chat.completion", "created": 0, "model": "", "choices": [choice]}
    body = json.dumps(answer)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(asked.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        head = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length:"
        writer.write(f"{head} {len(body)}\r\n\r\n{body}".encode())
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, asyncio.timeout(WARM_UP_S):
        port = server.sockets[0].getsockname()[1]
        async with AgentEndpoint(f"http://127.0.0.1:{port}", "none").client() as client:
            await client.chat.completions.create(model="", messages=[{"role": "user", "content": ""}])


class AgentHost:
    """What `processes.Process.call` calls."""

    def __init__(self, agent: Callable[[Row, AgentEndpoint], Any]) -> None:
        self._agent = agent

    def run(self, row: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any] | None:
        """The agent's reward parts: {"parts": ..., "failure", "detail"}, as `judge` sees what it returned. None if it
        gives no reward."""
        os.environ.update({BASE_URL: base_url, API_KEY: api_key})
        returned = self._agent(Row(**row), AgentEndpoint(base_url, api_key))
        if inspect.iscoroutine(returned):
            returned = asyncio.run(returned)
        if returned is None:
            return None
        verdict = judge(returned)
        return {"parts": verdict.parts, "failure": verdict.failure, "detail": verdict.detail}


class Command:
    """A program as an agent: the row as JSON on its standard input, and in `ASYNCRL_ROW` unless it is too long for a
    variable; its reward, as JSON, on the last line that it prints."""

    def __init__(self, words: list[str]) -> None:
        self._words = words

    def __call__(self, row: Row, endpoint: AgentEndpoint) -> Any:
        """Raises Unusable for a last line that is no reward, RuntimeError for an exit code other than 0."""
        told = msgspec.json.encode(row)
        environ = {**os.environ, BASE_URL: endpoint.base_url, API_KEY: endpoint.api_key}
        if len(told) <= LARGEST_VARIABLE:
            environ[ROW] = told.decode()
        process = subprocess.Popen(
            self._words, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr
        )
        assert process.stdin is not None
        assert process.stdout is not None
        output = _Tail(process.stdout)
        with contextlib.suppress(BrokenPipeError):  # it need not read it
            process.stdin.write(told)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        code = process.wait()
        said = output.text()
        if code != 0:
            raise RuntimeError(f"the command ended with exit code {code}; its last words: {said[-500:].strip()}")
        return reward_of(said)


def reward_of(output: str) -> float | Mapping[str, Any] | None:
    """The reward that a command's output ends with. Raises Unusable.

    >>> reward_of("thinking...\\n0.5\\n"), reward_of('{"correct": 1}'), reward_of("null")
    (0.5, {'correct': 1}, None)
    """
    lines = output.strip().splitlines()
    if not lines:
        raise Unusable("the command printed nothing: its last line must be the reward, as JSON, or null for none")
    try:
        found = json.loads(lines[-1])
    except (ValueError, RecursionError):
        found = lines[-1]
    if not isinstance(found, int | float | dict | None) or isinstance(found, bool):
        raise Unusable(
            f"the command's last line is {lines[-1]!r:.200}: print the reward there, as JSON: a number, an object of "
            "named parts, or null for none"
        )
    return found


class _Tail:
    """The end of what comes out of a pipe, which is read as fast as it comes."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._kept = bytearray()
        self._thread = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._thread.start()

    def text(self) -> str:
        self._thread.join(LAST_WORDS_S)
        return self._kept.decode(errors="replace")

    def _read(self, pipe: IO[bytes]) -> None:
        while piece := os.read(pipe.fileno(), 65536):
            self._kept += piece
            del self._kept[:-KEPT_OUTPUT]
