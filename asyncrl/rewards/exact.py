"""The reward part `exact`: the answer is the expected text, character for character."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.config.rewards import Exact, part_name
from asyncrl.rewards.base import BadRow, Finding

CUT_OFF = "cut_off"
NO_ANSWER = "no_answer"  # of verifiers that look for the answer in a text
WRONG_ANSWER = "wrong_answer"


def exact(text: str, expected: str, finish_reason: str) -> float:
    """1.0 iff the texts are equal and the model ended its answer itself, else 0.0.

    An answer cut off by the length limit may happen to be right so far; rewarding it would teach not to stop.
    """
    return float(finish_reason == "stop" and text == expected)


def compared(name: str, text: str, expected: str, finish_reason: str) -> Finding:
    """The same as a finding: the part `name`, and what is wrong."""
    value = exact(text, expected, finish_reason)
    if value:
        return Finding({name: value})
    return Finding({name: value}, WRONG_ANSWER if finish_reason == "stop" else CUT_OFF, f"expected {expected!r}")


class ExactMatch:
    """White space around answer and expectation does not count: models often end with a line break. A Verifier."""

    def __init__(self, part: Exact) -> None:
        self._name = part_name(part)

    def check(self, row: Mapping[str, Any]) -> None:
        if not isinstance(row["answer"], str):
            raise BadRow(
                f"row {row['id']}: the answer is {row['answer']!r:.100}, not text, which `exact` compares with"
            )

    def verify(self, row: Mapping[str, Any], answer: Mapping[str, Any]) -> Finding:
        self.check(row)
        return compared(self._name, answer["text"].strip(), row["answer"].strip(), answer["finish_reason"])
