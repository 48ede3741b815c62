"""Whole conversations from files, for imitation: rows of messages, or of a prompt and its answer.

A row with the messages column is a conversation: an optional system message, then user and assistant in turns, the
assistant last; results of tools may stand where the user's next message would. Any other row has a prompt (text, or
messages) and the answer to it. A message has a role and a content, both text: what no plain chat template renders
(calls that are no text, say) is refused, not dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.config.sft import SftData
from asyncrl.data.bad_rows import BadRows
from asyncrl.data.errors import DataError, RowError
from asyncrl.data.files import Files, open_files
from asyncrl.data.json_text import kind, shown
from asyncrl.data.rows import Prompt, check_text, read_answer, read_prompt, require_columns
from asyncrl.data.split import shared_prompts, split_heldout

log = logging.getLogger(__name__)

SECTION = "data"
"""Of the recipe: its keys name the files and columns."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One row. `where` is FILE:ROW; `messages` alternate between user (or tools) and assistant after an optional system
    message, and end with the assistant."""

    where: str
    messages: Sequence[Mapping[str, str]]

    @property
    def prompt(self) -> Prompt:
        """What comes before the first answer."""
        first = next(n for n, message in enumerate(self.messages) if message["role"] == "assistant")
        return [dict(message) for message in self.messages[:first]]


@dataclass(frozen=True, slots=True)
class Split:
    """What is trained and what is held out. `bad`: the policy, and the rows it has left out so far."""

    train: Sequence[Conversation]
    heldout: Sequence[Conversation]
    bad: BadRows


def read_split(data: SftData) -> Split:
    """The rows of the recipe's files; needs no model. Raises DataError."""
    bad = BadRows(data.bad_rows, key="data.bad_rows")

    def read(given: str | Sequence[str], key: str) -> list[Conversation]:
        columns = {"messages": data.messages, "prompt": data.prompt, "answer": data.answer}
        return read_conversations(open_files(given, data.format, key=f"{SECTION}.{key}"), **columns, bad=bad)

    train = read(data.train, "train")
    if data.heldout is None:
        return Split(*split_heldout(train, section=SECTION), bad)
    heldout = read(data.heldout, "heldout")
    if shared := shared_prompts(train, heldout):
        log.warning(
            "%d held-out prompts of %s also occur in %s: held-out loss will look too good",
            *(shared, data.heldout, data.train),
        )
    return Split(train, heldout, bad)


def read_conversations(files: Files, *, messages: str, prompt: str, answer: str, bad: BadRows) -> list[Conversation]:
    """All usable rows; `messages`, `prompt` and `answer` name columns. `bad` is told of the others.

    Raises DataError: there is no usable row.
    """

    def parse(where: str, _id: str, row: dict[str, Any]) -> Conversation:
        if row.get(messages) is not None or (messages in row and prompt not in row):
            turns = _messages(where, messages, row[messages])
        elif prompt in row or answer in row:
            require_columns(where, row, {"prompt": prompt, "answer": answer}, section=SECTION)
            asked = read_prompt(where, prompt, row[prompt])
            turns = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
            turns = [*turns, {"role": "assistant", "content": read_answer(where, answer, row[answer])}]
        else:
            raise RowError(
                "missing-column",
                f"{where}: neither {messages!r} nor {prompt!r} and {answer!r} are among its columns: "
                f"{', '.join(map(repr, row)) or 'none'}.\n"
                f"Name the right ones as {SECTION}.messages, or as {SECTION}.prompt and {SECTION}.answer.",
            )
        _check_turns(where, turns)
        return Conversation(where, turns)

    for warning in files.warnings:
        log.warning("%s", warning)
    rows = [row for _, row in files.parsed(parse, bad, first=len(files))]
    if not rows:
        raise DataError(
            f"{files.paths[0]} has no usable row: one needs the column {messages!r}, or {prompt!r} and {answer!r}"
            + (f". {bad}" if str(bad) else "")
        )
    return rows


def _messages(where: str, column: str, value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list):
        raise RowError(
            "null" if value is None else "wrong-type",
            f"{where}: column {column!r} is {kind(value)}: give a list of messages",
        )
    turns = []
    for number, message in enumerate(value, start=1):
        place = f"{where}: message {number}"
        if not isinstance(message, dict):
            raise RowError(
                "wrong-type", f'{place} is {shown(message)}: give {{"role": "user", "content": "..."}}, both strings'
            )
        for key in ("role", "content"):
            found = message.get(key)
            if not isinstance(found, str):
                raise RowError(
                    "null" if found is None else "wrong-type",
                    f"{place} has the {key} {shown(found)}: give a string, or remove the row",
                )
        others = [key for key, item in message.items() if key not in ("role", "content") and item is not None]
        if others:
            raise RowError(
                "wrong-type",
                f"{place} also has {', '.join(others)}, of which the model would see nothing: write it into the "
                "content, or remove it",
            )
        check_text(where, column, message["content"])
        turns.append({"role": message["role"], "content": message["content"]})
    return turns


def _check_turns(where: str, turns: Sequence[Mapping[str, str]]) -> None:
    """Raises RowError unless roles come in their order and no turn is empty."""
    if not turns:
        raise RowError("empty", f"{where}: the list of messages is empty: fill it in, or remove the row")
    first = 1 if turns[0]["role"] == "system" else 0
    for number, message in enumerate(turns[first:], start=first):
        before = turns[number - 1]["role"] if number > first else None
        due = {None: ("user",), "user": ("assistant",), "assistant": ("user", "tool"), "tool": ("assistant", "tool")}
        if message["role"] not in due[before]:
            raise RowError(
                "wrong-role",
                f"{where}: message {number + 1} is of role {shown(message['role'])}, where {due[before][0]} is due: "
                "an optional system message, then user (or the results of tools) and assistant in turns",
            )
    if turns[-1]["role"] != "assistant":
        raise RowError(
            "wrong-role", f"{where}: the last message is of role {turns[-1]['role']}: end with the assistant's answer"
        )
    for number, message in enumerate(turns, start=1):
        if not message["content"].strip():
            raise RowError(
                "empty",
                f"{where}: message {number}, of role {message['role']}, is empty: fill it in, or remove the row",
            )
