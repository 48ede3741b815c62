"""What a row is made of: prompt, answer, tools and the rest, by the names that the recipe has for the columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.data.errors import RowError
from asyncrl.data.json_text import kind, object_of, shown

Prompt = str | list[dict[str, str]]

REPLACED = "�" * 2
"""Two replacement characters in a row: what a decoder that was told to go on makes of letters it cannot read. One may
be meant, as in a question about it."""


MELTING = 8
"""Tokens that the template's text around one of a row's texts may have more than around another."""


@dataclass(frozen=True, slots=True)
class Record:
    """One row. `answer` is text (a whole number in the file is written out), None where the recipe names no column;
    `info` holds the other columns, and under `tools` what the model may call."""

    id: str
    prompt: Prompt
    answer: str | None
    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Columns:
    """Names of columns; None: there is none. `section`: of the recipe, whose keys these are, for messages."""

    prompt: str
    answer: str | None
    id: str | None
    tools: str
    section: str

    def record(self, where: str, own_id: str, row: Mapping[str, Any]) -> Record:
        """The row's parts; `own_id` is its id unless a column has one. Raises RowError."""
        named = {"prompt": self.prompt, "answer": self.answer, "id": self.id}
        columns = {key: column for key, column in named.items() if column is not None}
        require_columns(where, row, columns, section=self.section)
        info = {column: value for column, value in row.items() if column not in columns.values()}
        tools = read_tools(where, self.tools, info.pop(self.tools, None), section=self.section)
        return Record(
            own_id if self.id is None else _read_id(where, self.id, row[self.id]),
            read_prompt(where, self.prompt, row[self.prompt]),
            None if self.answer is None else read_answer(where, self.answer, row[self.answer]),
            {**info, "tools": tools} if tools else info,
        )


def require_columns(where: str, row: Mapping[str, Any], columns: Mapping[str, str], *, section: str) -> None:
    """`columns`: key of the recipe's `section` -> the column it names. Raises RowError for the first that is absent."""
    for key, column in columns.items():
        if column not in row:
            raise RowError(
                "missing-column",
                f"{where}: no column {column!r}; the row has {', '.join(map(repr, row)) or 'none'}.\n"
                f"Name the right one as {section}.{key}, or add it to the row.",
            )


def read_prompt(where: str, column: str, value: Any) -> Prompt:
    """The value of a prompt's column: text, or messages with a question among them. Raises RowError."""
    if isinstance(value, str):
        if not value.strip():
            raise RowError("empty", f"{where}: the prompt (column {column!r}) is empty: fill it in, or remove the row")
        check_text(where, column, value)
        return value
    if not isinstance(value, list):
        raise RowError(
            "null" if value is None else "wrong-type",
            f"{where}: the prompt (column {column!r}) is {kind(value)}: give a string or a list of messages",
        )
    for message in value:
        if not (isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))):
            raise RowError(
                "wrong-type",
                f"{where}: a message in column {column!r} is {shown(message)}: "
                'give {"role": "user", "content": "..."}, both strings',
            )
        if message.get("tool_calls"):
            raise RowError(
                "wrong-type",
                f"{where}: a message in column {column!r} has tool_calls, of which the model would see nothing: write "
                "them into the content, as the model writes them",
            )
        check_text(where, column, message["content"])
    if not any(message["role"] == "user" for message in value):
        raise RowError(
            "wrong-role", f"{where}: the messages in column {column!r} have none of role user: add the question"
        )
    if not any(message["role"] == "user" and message["content"].strip() for message in value):
        raise RowError(
            "empty",
            f"{where}: the messages of role user in column {column!r} are empty: fill them in, or remove the row",
        )
    return [{"role": message["role"], "content": message["content"]} for message in value]


def read_answer(where: str, column: str, value: Any) -> str:
    """The value of an answer's column: text, or a whole number, which is written out. Raises RowError."""
    if isinstance(value, str):
        if not value.strip():
            raise RowError("empty", f"{where}: the answer (column {column!r}) is empty: fill it in, or remove the row")
        check_text(where, column, value)
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if value is None:
        raise RowError("null", f"{where}: the answer (column {column!r}) is null: fill it in, or remove the row")
    raise RowError(
        "wrong-type",
        f"{where}: the answer (column {column!r}) is {kind(value)} {shown(value)}: "
        "write it as a string, exactly as the model is to answer",
    )


def read_tools(where: str, column: str, value: Any, *, section: str) -> list[dict[str, Any]]:
    """What a row's model may call: a list of {"type": "function", "function": {"name": ...}}, or that list as text; []
    where there is none. Columnar files give every object the keys of all others, as null: those are left out.
    Raises RowError."""
    if value is None or value == "":
        return []
    if isinstance(value, str):
        tools = object_of(f"{where}: column {column!r}", b'{"tools": %s}' % value.encode())["tools"]
    else:
        tools = _without_nulls(value)
    if not isinstance(tools, list) or not all(map(_is_function, tools)):
        raise RowError(
            "wrong-tools",
            f"{where}: the tools (column {column!r}) are {shown(value)}: give a list of "
            '{"type": "function", "function": {"name": ..., "parameters": ...}}, or that list as text.\n'
            f"Of a column that is something else, take the name away: {section}.tools=another_name",
        )
    return tools


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _read_id(where: str, column: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise RowError(
            "null" if value is None else "wrong-type",
            f"{where}: the id (column {column!r}) is {shown(value)}: give text or a whole number",
        )
    return str(value)


def texts_of(prompt: Prompt) -> list[str]:
    """What a prompt says, without who says it."""
    return [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]


def most_tokens(*texts: str) -> int:
    """As many tokens as any usual tokenizer may make of these texts, each with an end where it may melt into what
    stands beside it: one a byte (bytes are the smallest piece that there is), and of what is not ASCII three a byte,
    since NFC, which many tokenizers apply first, writes some letters in three times the bytes (U+1D160). A tokenizer
    that writes text in still more pieces, or a template that writes it twice, can have more: such a row is not counted
    before the run, and fails its ticket."""
    return sum((len(text) if text.isascii() else 3 * len(text.encode())) + MELTING for text in texts)


def check_text(where: str, column: str, text: str) -> None:
    """Raise RowError where the text was damaged before it was written."""
    if REPLACED in text:
        raise RowError(
            "not-text",
            f"{where}: column {column!r} has a run of replacement characters (U+FFFD) at character "
            f"{text.index(REPLACED)}: it was decoded wrongly before it was saved; export it again as UTF-8",
        )
