"""What a row says is right, as text: the same rules for every verifier that compares texts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from asyncrl.rewards.base import BadRow


def golds(row: Mapping[str, Any], part: str) -> list[str]:
    """The answers that are right: of `row["answer"]`, which is a text, a whole number or a list of those, not empty.
    Raises BadRow, with the name of the part, for anything else.

    >>> golds({"id": "7", "answer": [1, "one"]}, "f1")
    ['1', 'one']
    """
    answer = row["answer"]
    several = answer if isinstance(answer, list) and answer else [answer]
    for one in several:
        if isinstance(one, bool) or not isinstance(one, str | int) or not str(one).strip():
            fix = f": write {str(one)!r}" if isinstance(one, float) and math.isfinite(one) else ""
            raise BadRow(f"row {row['id']}: the answer is {answer!r:.100}; `{part}` compares with text, not empty{fix}")
        if isinstance(one, int) and not -(2**63) <= one < 2**64:  # which could not be sent to the verifier
            raise BadRow(f"row {row['id']}: the answer is {one:.6e}, a number of more than 64 bits: write it as text")
    return [str(one).strip() for one in several]
