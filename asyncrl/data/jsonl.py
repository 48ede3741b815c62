"""Rows of a JSONL file, each line parsed once and checked strictly; prompts and answers among them.

What is wrong is said with file and row, before any process starts: a row that is silently dropped or bent would teach
the model something that nobody wrote.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from asyncrl.data.errors import DataError, RowError

Prompt = str | list[dict[str, str]]

HELDOUT_SHARE = 10  # one prompt in so many


class HasPrompt(Protocol):
    """A row with a prompt, by which it is told from others."""

    @property
    def prompt(self) -> Prompt: ...


T = TypeVar("T")
R = TypeVar("R", bound=HasPrompt)


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

    def parse(where: str, number: int, row: dict[str, Any]) -> Record:
        require_columns(where, row, {"prompt": prompt, "answer": answer}, section="task.data")
        others = {key: value for key, value in row.items() if key not in (prompt, answer)}
        return Record(number, read_prompt(where, prompt, row[prompt]), read_answer(where, answer, row[answer]), others)

    records = read_rows(path, parse, section="task.data")
    if not records:
        raise DataError(f"{path} is empty: it needs at least one row with the columns {prompt!r} and {answer!r}")
    return records


def refuse(error: RowError) -> NoReturn:
    """No row may be bad."""
    raise error


def read_rows(
    path: Path,
    parse: Callable[[str, int, dict[str, Any]], T],
    *,
    section: str,
    bad: Callable[[RowError], None] = refuse,
) -> list[T]:
    """`parse(FILE:ROW, row, object)` of every line that is not blank; rows count from 1.

    `section`: of the recipe, whose keys name this file. `bad` is told of each row that cannot be used, and decides by
    raising or returning. Raises DataError: missing or unreadable file, or one in UTF-16; and what `bad` raises.
    """
    rows = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise DataError(f"{path} is UTF-16: save it as UTF-8 (`iconv -f UTF-16 -t UTF-8`)")
                try:
                    if number == 1 and line.startswith(codecs.BOM_UTF8):
                        raise RowError(
                            "not-json",
                            f"{path} starts with a byte order mark: save it as UTF-8 without one "
                            "(`sed -i '1s/^\\xEF\\xBB\\xBF//'`)",
                        )
                    if line.strip():
                        where = f"{path}:{number}"
                        rows.append(parse(where, number, _object(where, line)))
                except RowError as error:
                    bad(error)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist (relative to {Path.cwd()}): correct {section}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}: give a JSONL file as {section}") from error
    return rows


def split_heldout(records: Sequence[R], *, section: str = "task.data") -> tuple[list[R], list[R]]:
    """(train, held out): about one distinct prompt in ten is held out, chosen by a hash of its text.

    Rows with the same prompt (but for white space) land on the same side, so a repeated prompt cannot leak; a prompt
    keeps its side when rows are added or reordered. In a small file, where the hash would leave a side empty, the
    prompt with the smallest or greatest hash goes there. Raises DataError if all rows have the same prompt.
    """
    keys = [prompt_key(record.prompt) for record in records]
    distinct = set(keys)
    if len(distinct) < 2:
        raise DataError(
            f"all rows have the same prompt, so none can be held out: give a file of other prompts as {section}.heldout"
        )
    heldout = {key for key in distinct if key % HELDOUT_SHARE == 0} or {min(distinct)}
    if heldout == distinct:
        heldout.remove(max(distinct))
    sides: tuple[list[R], list[R]] = ([], [])
    for key, record in zip(keys, records, strict=True):
        sides[key in heldout].append(record)
    return sides


def shared_prompts(left: Iterable[HasPrompt], right: Iterable[HasPrompt]) -> int:
    """How many distinct prompts occur on both sides."""
    return len({prompt_key(record.prompt) for record in left} & {prompt_key(record.prompt) for record in right})


def prompt_key(prompt: Prompt) -> int:
    """64 bits of a hash of the prompt's text without regard to white space; a string equals its one user message."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    text = "\x1f".join(f"{message['role']}\x1e{' '.join(message['content'].split())}" for message in messages)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def require_columns(where: str, row: Mapping[str, Any], columns: Mapping[str, str], *, section: str) -> None:
    """`columns`: key of the recipe's `section` -> the column it names. Raises RowError for the first that is absent."""
    for key, column in columns.items():
        if column not in row:
            raise RowError(
                "missing-column",
                f"{where}: no column {column!r}; the row has {', '.join(map(repr, row)) or 'none'}.\n"
                f"Name the right one as {section}.{key}, or add it to the row.",
            )


def _object(where: str, line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line.decode(), object_pairs_hook=_no_duplicates, parse_constant=_no_constants)
        if b"\\u" in line:  # half a surrogate pair parses, but is no text: it fails here
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise RowError(
            "not-utf8", f"{where}: not UTF-8 (byte {error.start} of the row): save the file as UTF-8"
        ) from None
    except UnicodeEncodeError:
        raise RowError(
            "not-text", f"{where}: half of a surrogate pair (\\ud800-\\udfff) is no text: repair the row"
        ) from None
    except json.JSONDecodeError as error:
        raise RowError(
            "not-json", f"{where}: not JSON: {error.msg} at character {error.colno}: one object per line"
        ) from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # of the hooks, or a number or a nesting beyond the interpreter's limits
        raise RowError("not-json", f"{where}: {error}") from None
    if isinstance(value, list):
        raise RowError(
            "wrong-type", f"{where}: a list, not an object: of a .json file, make a JSONL file with `jq -c '.[]'`"
        )
    if not isinstance(value, dict):
        raise RowError("wrong-type", f"{where}: {kind(value)}, not an object: one object per line")
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


def read_prompt(where: str, column: str, value: Any) -> Prompt:
    """The value of a prompt's column: text, or messages with a question among them. Raises RowError."""
    if isinstance(value, str):
        if not value.strip():
            raise RowError("empty", f"{where}: the prompt (column {column!r}) is empty: fill it in, or remove the row")
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
    if not any(message["role"] == "user" for message in value):
        raise RowError(
            "wrong-role", f"{where}: the messages in column {column!r} have none of role user: add the question"
        )
    return [{"role": message["role"], "content": message["content"]} for message in value]


def read_answer(where: str, column: str, value: Any) -> str:
    """The value of an answer's column: text, or a whole number, which is written out. Raises RowError."""
    if isinstance(value, str):
        if not value.strip():
            raise RowError("empty", f"{where}: the answer (column {column!r}) is empty: fill it in, or remove the row")
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


def kind(value: Any) -> str:
    """What a JSON value is, in words."""
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return "null" if value is None else names[type(value)]


def shown(value: Any) -> str:
    """A JSON value as it is written, cut where it gets long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
