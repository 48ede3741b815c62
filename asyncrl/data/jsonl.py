"""Prompts and answers from a JSONL file, each line parsed once and checked strictly.

What is wrong is said with file and row, before any process starts: a row that is silently dropped or bent would teach
the model something that nobody wrote.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

Prompt = str | list[dict[str, str]]

HELDOUT_SHARE = 10  # one prompt in so many


class DataError(Exception):
    """A data file cannot be used. One to three lines: file and row, what is wrong, and the fix."""


@dataclass(frozen=True, slots=True)
class Record:
    """One row. `row` is its line number from 1; `answer` is text (a whole number in the file is written out);
    `info` holds the other columns."""

    row: int
    prompt: Prompt
    answer: str
    info: Mapping[str, Any]


def read_jsonl(path: Path, *, prompt: str, answer: str) -> list[Record]:
    """All rows of a file whose columns `prompt` and `answer` are so named. Blank lines are passed over, but counted.

    Raises DataError: missing, unreadable or empty file; a row that is not one strict JSON object in UTF-8; a column
    that is missing, null, empty or of the wrong type.
    """
    records = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if number == 1:
                    _refuse_byte_order_mark(path, line)
                if line.strip():
                    records.append(_record(f"{path}:{number}", number, line, prompt, answer))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist (relative to {Path.cwd()}): correct task.data") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}: give a JSONL file as task.data") from error
    if not records:
        raise DataError(f"{path} is empty: it needs at least one row with the columns {prompt!r} and {answer!r}")
    return records


def split_heldout(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """(train, held out): about one distinct prompt in ten is held out, chosen by a hash of its text.

    Rows with the same prompt (but for white space) land on the same side, so a repeated prompt cannot leak; a prompt
    keeps its side when rows are added or reordered. In a small file, where the hash would leave a side empty, the
    prompt with the smallest or greatest hash goes there. Raises DataError if all rows have the same prompt.
    """
    keys = [prompt_key(record.prompt) for record in records]
    distinct = set(keys)
    if len(distinct) < 2:
        raise DataError(
            "all rows have the same prompt, so none can be held out: give a file of other prompts as task.data.heldout"
        )
    heldout = {key for key in distinct if key % HELDOUT_SHARE == 0} or {min(distinct)}
    if heldout == distinct:
        heldout.remove(max(distinct))
    sides: tuple[list[Record], list[Record]] = ([], [])
    for key, record in zip(keys, records, strict=True):
        sides[key in heldout].append(record)
    return sides


def shared_prompts(left: Iterable[Record], right: Iterable[Record]) -> int:
    """How many distinct prompts occur on both sides."""
    return len({prompt_key(record.prompt) for record in left} & {prompt_key(record.prompt) for record in right})


def prompt_key(prompt: Prompt) -> int:
    """64 bits of a hash of the prompt's text without regard to white space; a string equals its one user message."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    text = "\x1f".join(f"{message['role']}\x1e{' '.join(message['content'].split())}" for message in messages)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def _record(where: str, number: int, line: bytes, prompt: str, answer: str) -> Record:
    row = _object(where, line)
    columns = ", ".join(map(repr, row)) or "none"
    for column, key in ((prompt, "prompt"), (answer, "answer")):
        if column not in row:
            raise DataError(
                f"{where}: no column {column!r}; the row has {columns}.\n"
                f"Name the right one as task.data.{key}, or add it to the row."
            )
    others = {key: value for key, value in row.items() if key not in (prompt, answer)}
    return Record(number, _prompt(where, prompt, row[prompt]), _answer(where, answer, row[answer]), others)


def _object(where: str, line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line.decode(), object_pairs_hook=_no_duplicates, parse_constant=_no_constants)
        if b"\\u" in line:  # half a surrogate pair parses, but is no text: it fails here
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 (byte {error.start} of the row): save the file as UTF-8") from None
    except UnicodeEncodeError:
        raise DataError(f"{where}: half of a surrogate pair (\\ud800-\\udfff) is no text: repair the row") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error.msg} at character {error.colno}: one object per line") from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # of the hooks, or a number or a nesting beyond the interpreter's limits
        raise DataError(f"{where}: {error}") from None
    if isinstance(value, list):
        raise DataError(f"{where}: a list, not an object: of a .json file, make a JSONL file with `jq -c '.[]'`")
    if not isinstance(value, dict):
        raise DataError(f"{where}: {_kind(value)}, not an object: one object per line")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {repeated!r} occurs twice: keep one")
    return row


def _no_constants(literal: str) -> None:
    raise ValueError(f"{literal} is not JSON: write a number, a string, or null")


def _prompt(where: str, column: str, value: Any) -> Prompt:
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{where}: the prompt (column {column!r}) is empty: fill it in, or remove the row")
        return value
    if not isinstance(value, list):
        raise DataError(
            f"{where}: the prompt (column {column!r}) is {_kind(value)}: give a string or a list of messages"
        )
    for message in value:
        if not (isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))):
            raise DataError(
                f"{where}: a message in column {column!r} is {_shown(message)}: "
                'give {"role": "user", "content": "..."}, both strings'
            )
    if not any(message["role"] == "user" for message in value):
        raise DataError(f"{where}: the messages in column {column!r} have none of role user: add the question")
    return [{"role": message["role"], "content": message["content"]} for message in value]


def _answer(where: str, column: str, value: Any) -> str:
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{where}: the answer (column {column!r}) is empty: fill it in, or remove the row")
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if value is None:
        raise DataError(f"{where}: the answer (column {column!r}) is null: fill it in, or remove the row")
    raise DataError(
        f"{where}: the answer (column {column!r}) is {_kind(value)} {_shown(value)}: "
        "write it as a string, exactly as the model is to answer"
    )


def _kind(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return "null" if value is None else names[type(value)]


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _refuse_byte_order_mark(path: Path, line: bytes) -> None:
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{path} is UTF-16: save it as UTF-8 (`iconv -f UTF-16 -t UTF-8`)")
    if line.startswith(codecs.BOM_UTF8):
        raise DataError(
            f"{path} starts with a byte order mark: save it as UTF-8 without one (`sed -i '1s/^\\xEF\\xBB\\xBF//'`)"
        )
