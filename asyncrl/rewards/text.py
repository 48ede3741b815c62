"""The reward parts `regex` and `f1`: answers that are text."""

from __future__ import annotations

import re
import string
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from asyncrl.config.rewards import F1, Regex, part_name
from asyncrl.rewards.base import Finding
from asyncrl.rewards.exact import CUT_OFF, NO_ANSWER, WRONG_ANSWER
from asyncrl.rewards.gold import golds

PARTIAL = "partial_answer"

ARTICLE = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


class PatternMatch:
    """A pattern that is found, or whose last match holds the row's answer. `.` takes no line breaks. A pattern may take
    for ever on some text: this runs where it can be killed. A Verifier."""

    def __init__(self, part: Regex) -> None:
        self._name = part_name(part)
        self._pattern = re.compile(part.pattern)

    def check(self, row: Mapping[str, Any]) -> None:
        if self._pattern.groups:
            golds(row, "regex")

    def verify(self, row: Mapping[str, Any], answer: Mapping[str, Any]) -> Finding:
        expected = golds(row, "regex") if self._pattern.groups else []
        if answer["finish_reason"] != "stop":
            return Finding({self._name: 0.0}, CUT_OFF)
        last = deque(self._pattern.finditer(answer["text"]), maxlen=1)
        if not last:
            return Finding({self._name: 0.0}, NO_ANSWER, f"nothing matches {self._pattern.pattern!r:.100}")
        if not expected:
            return Finding({self._name: 1.0})
        given = (last[0][1] or "").strip()
        right = given in expected
        detail = "" if right else f"expected {expected[0]!r:.200}, got {given!r:.200}"
        return Finding({self._name: float(right)}, "" if right else WRONG_ANSWER, detail, given)


class WordOverlap:
    """Nothing of an answer that was cut off counts. A Verifier."""

    def __init__(self, part: F1) -> None:
        self._name = part_name(part)

    def check(self, row: Mapping[str, Any]) -> None:
        golds(row, "f1")

    def verify(self, row: Mapping[str, Any], answer: Mapping[str, Any]) -> Finding:
        expected = golds(row, "f1")
        if answer["finish_reason"] != "stop":
            return Finding({self._name: 0.0}, CUT_OFF)
        value = max(f1(answer["text"], one) for one in expected)
        wrong = "" if value == 1.0 else PARTIAL if value else WRONG_ANSWER
        return Finding({self._name: value}, wrong, f"expected {expected[0]!r:.200}" if wrong else "")


def f1(text: str, expected: str) -> float:
    """Harmonic mean of precision and recall over words, each counted as often as it occurs, as SQuAD 1.1 has it
    (arXiv 1606.05250, section 6.1): without case, ASCII punctuation and English articles. Where nothing is left of
    one, 1.0 if nothing is left of the other either.

    >>> f1("The cat sat.", "a cat sat down"), f1("dog", "cat")
    (0.8, 0.0)
    """
    given, wanted = Counter(_words(text)), Counter(_words(expected))
    if not given or not wanted:
        return float(given == wanted)
    return 2 * (given & wanted).total() / (given.total() + wanted.total())


def _words(text: str) -> list[str]:
    return ARTICLE.sub(" ", text.lower().translate(PUNCTUATION)).split()
