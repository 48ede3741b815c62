"""What a task is: rows, how to present them, how to score an answer.

A task is named in the recipe (`task.type`) as a built-in or as `module:Class`. It is built once in the collector (rows
and prompts) and once in each verifier process (scores), from the same options, so it must be cheap to build and must
not depend on process state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, Protocol, TypedDict

from asyncrl.rewards.base import Finding

Split = Literal["train", "heldout"]


class TaskError(Exception):
    """The task cannot be used as it is. One to three lines: what, where, and the fix."""


class NotInstalled(TaskError):
    """A package that the task needs is not on this machine; names the command that installs it."""


class Message(TypedDict):
    """One chat message, in the form every chat template takes.

    tool_calls: what an assistant asked for, [{"id", "type": "function", "function": {"name", "arguments": {...}}}];
    tool_call_id and name: which of them a message of the role `tool` answers.
    """

    role: str
    content: str
    tool_calls: NotRequired[Sequence[Mapping[str, Any]]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of data. `id` is unique within a split and stable across runs; `answer` is what the verifier compares to.

    Rows travel to the verifier's process: `answer` and `info` hold JSON values (None, bool, number, str, list, dict).
    """

    id: str
    prompt: str | Sequence[Message]
    answer: Any = None
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model wrote for a row. `text` is decoded without the end token; `finish_reason` stop, length, ...

    Of an episode of several turns `text` and `finish_reason` are the last answer's, `token_ids` all that was sampled,
    and `messages` the conversation after the row's own: answers and what came back. Of one answer they are empty.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    messages: Sequence[Message] = ()


class Task(Protocol):
    """Rows, presentation, scores. `name` goes into every trajectory."""

    name: str

    def rows(self, split: Split) -> Sequence[Row]:
        """The rows of a split, at least one. `len()` and `[i]` suffice: a procedural task may make them on demand."""

    def messages(self, row: Row) -> list[Message]:
        """The conversation the model answers."""

    def score(self, row: Row, answer: Answer) -> Finding | Mapping[str, float | None] | float:
        """Named reward parts (a bare float is the part "reward"), or a `Finding`, which also has the class of what is
        wrong. None or NaN = unscored, never 0. Runs in a worker process that is killed when it takes longer than the
        recipe's limit."""

    def part_weights(self) -> Mapping[str, float]:
        """Weight of each part in the reward; a part left out weighs 1."""
