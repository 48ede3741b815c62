"""What answers the model during one episode: an environment in a process of its own, or tools."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from msgspec import to_builtins

from asyncrl.environments.base import (
    DIED,
    INVALID,
    RAISED,
    TIMEOUT,
    EnvironmentFailed,
    EnvironmentLost,
    Step,
)
from asyncrl.environments.processes import CallFailed, Process, Processes, ProcessesLost
from asyncrl.rewards.tool_call_text import ToolCall
from asyncrl.tasks.base import Answer, Message, Row
from asyncrl.tasks.tool_calls import ToolFormat, tool_calls
from asyncrl.tasks.tools import as_text

FAILURES = {"raised": RAISED, "timeout": TIMEOUT, "died": DIED, "invalid": INVALID}
"""Kind of a failed call -> the failure's class."""


class Live(Protocol):
    """Of one episode; used by one task at a time. All methods raise EnvironmentFailed and EnvironmentLost."""

    async def reset(self, row: Row, seed: int) -> Sequence[Message] | None:
        """What the model answers first; None: the row's own conversation."""

    async def step(self, answer: Answer) -> Step: ...

    async def score(self) -> Mapping[str, float | None] | None:
        """The reward parts of the episode; None: the task scores it."""

    async def close(self) -> None:
        """The episode went as it should."""

    async def end(self) -> None:
        """Nothing of it is left after this. Raises nothing."""

    @property
    def info(self) -> Mapping[str, Any]:
        """For the record."""


class LiveEnvironment(Live):
    """An environment of the user's. step_s: seconds that each of its methods may take."""

    def __init__(self, processes: Processes, *, step_s: float) -> None:
        self._processes, self._step_s = processes, step_s
        self._process: Process | None = None
        self._info: dict[str, Any] = {}

    @property
    def info(self) -> Mapping[str, Any]:
        return self._info

    async def reset(self, row: Row, seed: int) -> Sequence[Message] | None:
        try:
            self._process = await self._processes.begin(seed)
        except ProcessesLost as error:
            raise EnvironmentLost(str(error)) from error
        opening: list[Message] | None = await self._call("reset", to_builtins(row), seed)
        return opening

    async def step(self, answer: Answer) -> Step:
        step = Step(**await self._call("step", to_builtins(answer)))
        self._info.update(step.info)
        return step

    async def score(self) -> Mapping[str, float | None] | None:
        parts: dict[str, float | None] | None = await self._call("score")
        return parts

    async def close(self) -> None:
        await self._call("close")

    async def end(self) -> None:
        if self._process is not None:
            await self._process.end()

    async def _call(self, method: str, *arguments: Any) -> Any:
        if self._process is None:
            raise RuntimeError(f"{method} before reset")
        try:
            return await self._process.call(method, *arguments, limit_s=self._step_s)
        except CallFailed as error:
            raise EnvironmentFailed(FAILURES[error.kind], f"{method}: {error}") from error
        except ProcessesLost as error:
            raise EnvironmentLost(str(error)) from error


class Tools(Live):
    """Functions that the model calls. An answer without a call ends the episode.

    What goes wrong in a call is told to the model, and costs nothing but that call: functions have no state that an
    episode could miss, so that a process that was lost to one of them is replaced at the next call. role: of the
    messages with results; malformed: whether a call that cannot be read is told or ends the episode.
    """

    def __init__(
        self,
        processes: Processes,
        names: Sequence[str],
        *,
        form: ToolFormat,
        role: Literal["tool", "user"],
        malformed: Literal["tell", "end"],
        step_s: float,
    ) -> None:
        self._processes, self._names = processes, tuple(names)
        self._form: ToolFormat = form
        self._role, self._malformed, self._step_s = role, malformed, step_s
        self._process: Process | None = None
        self._seed = 0
        self._ids = itertools.count(1)
        self._counts = Counter({"tool_calls": 0, "tool_errors": 0})

    @property
    def info(self) -> Mapping[str, Any]:
        return dict(self._counts)

    async def reset(self, row: Row, seed: int) -> Sequence[Message] | None:
        self._seed = seed
        return None

    async def step(self, answer: Answer) -> Step:
        found = tool_calls(answer.text, self._form)
        if answer.finish_reason == "length" or not (found.calls or found.problem):  # what was cut off is no call
            return Step(done=True)
        if found.problem and self._malformed == "end":
            self._counts["tool_errors"] += 1
            return Step(done=True)
        results = [(call.name, await self._result(call)) for call in found.calls]
        if found.problem:
            self._counts["tool_errors"] += 1
            results.append(("", f"Error: this call cannot be read: {found.problem}"))
        if self._role == "user":  # templates without a role for tools often want user and assistant in turns
            return Step([{"role": "user", "content": "\n".join(text for _, text in results)}])
        return Step([self._message(name, text) for name, text in results])

    async def score(self) -> Mapping[str, float | None] | None:
        return None

    async def close(self) -> None:
        return None

    async def end(self) -> None:
        if self._process is not None:
            await self._process.end()
            self._process = None

    def _message(self, name: str, text: str) -> Message:
        # Nine characters, letters and digits: some templates take no other ids.
        message: Message = {"role": "tool", "content": text, "tool_call_id": f"call{next(self._ids):05}"}
        if name:
            message["name"] = name
        return message

    async def _result(self, call: ToolCall) -> str:
        """What the model reads of a call."""
        self._counts["tool_calls"] += 1
        if call.name not in self._names:
            error = f"there is no tool {call.name}; there are: {', '.join(self._names)}"
        else:
            try:
                if self._process is None:
                    self._process = await self._processes.begin(self._seed)
                result: dict[str, str] = await self._process.call(
                    "tool", call.name, call.arguments, limit_s=self._step_s
                )
                if "text" in result:
                    return result["text"]
                error = result["error"]
            except ProcessesLost as lost:
                raise EnvironmentLost(str(lost)) from lost
            except CallFailed as failed:
                error = {
                    "timeout": f"{call.name} timed out after {self._step_s:g} s",
                    "died": f"{call.name} ended its process",
                }.get(failed.kind, str(failed))
                await self.end()  # the next call gets a new one
        self._counts["tool_errors"] += 1
        return as_text(f"Error: {error}")
