"""JSON as its definition has it (RFC 8259): what Python reads beyond that, another program would not."""

from __future__ import annotations

import json
import math
import sys
from typing import Any


def strict_json(text: str) -> Any:
    """The value that the whole text is. Raises ValueError, or RecursionError for one that is nested too deep.

    Beside what is no JSON at all, such as single quotes, comments and text behind it, it refuses what some read in one
    way and others in another: a key that occurs twice, NaN and infinity, numbers beyond a float.

    >>> strict_json('{"a": 1}')
    {'a': 1}
    """
    return json.loads(
        text,
        object_pairs_hook=_without_duplicates,
        parse_constant=_no_constant,
        parse_float=_finite,
        parse_int=_within_a_float,
    )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r:.80} occurs twice")
        found[key] = value
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def _within_a_float(text: str) -> int:
    if abs(number := int(text)) > sys.float_info.max:  # infinity to others, and no number that a schema can divide
        raise ValueError(f"{text:.20}... is beyond what a JSON number can be")
    return number


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{number} is no JSON number")
    return number
