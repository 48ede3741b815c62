"""One row of JSON, read strictly: what JSON leaves open, or a reader might bend, is refused by name."""

from __future__ import annotations

import json
import math
from typing import Any

from asyncrl.data.errors import RowError


def object_of(where: str, text: bytes) -> dict[str, Any]:
    """The object that `text` is. Raises RowError: no strict JSON in UTF-8, a key that occurs twice, NaN and its like,
    half of a surrogate pair, another value than an object."""
    try:
        value = DECODER.decode(text.decode())
        if b"\\u" in text:  # half a surrogate pair parses, but is no text: it fails here
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
            "not-json", f"{where}: not JSON: {error.msg} at character {error.colno}: one object per row"
        ) from None
    except (ValueError, RecursionError) as error:  # of the hooks; a number or nesting beyond the interpreter's limits
        raise RowError("not-json", f"{where}: {error}") from None
    if isinstance(value, list):
        raise RowError(
            "wrong-type", f"{where}: a list, not an object: a file that is one list of objects is of the format `json`"
        )
    if not isinstance(value, dict):
        raise RowError("wrong-type", f"{where}: {kind(value)}, not an object: one object per row")
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


def _finite(literal: str) -> float:
    value = float(literal)
    if math.isinf(value):
        raise ValueError(f"the number {literal:.40} is too large: write another, or a string")
    return value


def _whole(literal: str) -> int | str:
    """A whole number, as text beyond 64 bits: no process could be sent it as a number, nor a row with it."""
    if len(literal) < len(str(1 << 63)) or (len(literal) <= len(str(1 << 64)) and -(1 << 63) <= int(literal) < 1 << 64):
        return int(literal)
    return literal


DECODER = json.JSONDecoder(
    object_pairs_hook=_no_duplicates, parse_constant=_no_constants, parse_float=_finite, parse_int=_whole
)


def kind(value: Any) -> str:
    """What a JSON value is, in words."""
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return "null" if value is None else names[type(value)]


def shown(value: Any) -> str:
    """A JSON value as it is written, cut where it gets long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
