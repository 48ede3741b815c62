"""Questions that nobody can answer without looking something up: what is in a box, read backwards.

The model asks `lookup`, reads what it gets, and answers: an episode of two answers.
"""

from __future__ import annotations

import hashlib

from asyncrl.tasks.base import Row

BOXES = 1000
HELDOUT = 300  # boxes that are only opened to evaluate


def lookup(key: str) -> str:
    """Look into a box.

    Args:
        key: Number of the box, three digits.
    """
    if not (key.isdecimal() and len(key) == 3):
        raise ValueError(f"no box {key}")
    return str(int(hashlib.sha256(key.encode()).hexdigest(), 16))[-4:]


class Boxes:
    tools = (lookup,)

    def rows(self, split):
        keys = [f"{n * 7 % BOXES:03}" for n in range(BOXES)]
        chosen = keys[:HELDOUT] if split == "heldout" else keys[HELDOUT:]
        return [Row(id=key, prompt=f"box {key}", answer=lookup(key)[::-1]) for key in chosen]

    def score(self, row, answer):
        return float(answer.text == row.answer and answer.finish_reason == "stop")
