r"""The reward part `math`: whether the last \boxed{...} is what the row says, mathematically.

| step                                                   | module        |
|--------------------------------------------------------|---------------|
| which text is the answer                               | `math_box`    |
| one way to write it; equal texts are right             | `math_text`   |
| numbers, exactly                                       | `math_number` |
| what the row expects                                   | `math_gold`   |
| what is not computed                                   | `math_guard`  |
| units that differ                                      | `math_unit`   |
| what has to be written as the row writes it            | `math_written`|
| everything else, by math-verify over SymPy             | `math_algebra`, `math_relation`, `math_value` |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.config.rewards import Math, part_name
from asyncrl.rewards.base import BadRow, Finding
from asyncrl.rewards.exact import CUT_OFF, NO_ANSWER, WRONG_ANSWER
from asyncrl.rewards.gold import golds
from asyncrl.rewards.math_box import Unclosed, boxed, last_expression
from asyncrl.rewards.math_gold import Gold, compared, gold
from asyncrl.rewards.math_guard import LONGEST, too_complex
from asyncrl.rewards.math_number import read
from asyncrl.rewards.math_text import plain
from asyncrl.rewards.math_unit import other_unit
from asyncrl.rewards.math_written import same_writing
from asyncrl.rewards.time_limit import Late, limit

UNREADABLE = "unreadable"  # a box that is not closed, or no mathematics
TOO_COMPLEX = "too_complex"
TIMEOUT = "timeout"  # of the algebra over this answer

ALGEBRA_S = 2.0
"""Seconds of computing with an answer, not of time: a right answer is no less right where a machine has other work. A
comparison takes 5 ms; `simplify` may take for ever on an answer that no row would expect."""


class MathAnswer:
    """Of an answer that was cut off nothing counts: rewarding it would teach not to stop. A Verifier."""

    def __init__(self, part: Math) -> None:
        self._name = part_name(part)
        self._preferred = part.boxed == "preferred"
        # Before the process is killed at the part's own limit, which would leave the answer unscored.
        self._limit_s = ALGEBRA_S if part.timeout_s is None else min(ALGEBRA_S, part.timeout_s / 2)

    def check(self, row: Mapping[str, Any]) -> None:
        for expected in self._expected(row):
            try:
                expected.check(self._limit_s)
            except ValueError as error:
                raise _bad(row, expected.source, error) from None

    def verify(self, row: Mapping[str, Any], answer: Mapping[str, Any]) -> Finding:
        expected = self._expected(row)
        if answer["finish_reason"] != "stop":
            return self._wrong(CUT_OFF, "")
        try:
            given = boxed(answer["text"])
        except Unclosed as error:
            return self._wrong(UNREADABLE, str(error))
        if given is None and self._preferred:
            given = last_expression(answer["text"])
        if not given:
            return self._wrong(NO_ANSWER, "no box" if given is None else "an empty box")
        if any(given == one.source for one in expected):
            return Finding({self._name: 1.0}, read=given)
        if len(given) > LONGEST:
            return self._wrong(TOO_COMPLEX, f"{len(given):,} characters, more than {LONGEST:,}")
        text = plain(given)  # also what votes are counted by: 1,000 and 1000 are one answer
        if fitting := [one for one in expected if not other_unit(one.source, given)]:
            wrong, detail = self._compare(row, fitting, text)
        else:
            wrong, detail = _mismatch(expected, given)
        return Finding({self._name: float(not wrong)}, wrong, detail, text)

    def _compare(self, row: Mapping[str, Any], expected: list[Gold], text: str) -> tuple[str, str]:
        """The class of what is wrong with a plain text, "" if nothing is, and a detail."""
        number = read(text)
        for one in expected:
            if one.is_written(text) or (number and one.number and one.number.equals(number)):
                return "", ""
        others = []
        for one in expected:
            if one.said is None and not (number and one.number):
                same = same_writing(one.text, text)
                if same:
                    return "", ""
                if same is None:
                    others.append(one)
        if not others:
            return _mismatch(expected, text)
        if reason := too_complex(text):
            return TOO_COMPLEX, reason
        for one in others:
            try:
                _ = one.parsed  # before the limit, which is the answer's
            except ValueError as error:
                raise _bad(row, one.source, error) from None
        try:
            with limit(self._limit_s, of="computing"):
                found = [compared(one, text) for one in others]
        except Late:
            return TIMEOUT, f"more than {self._limit_s:g} s of algebra: {text!r:.200}"
        if None in found:
            return UNREADABLE, f"no expression: {text!r:.200}"
        return ("", "") if any(found) else _mismatch(expected, text)

    def _wrong(self, wrong: str, detail: str) -> Finding:
        return Finding({self._name: 0.0}, wrong, detail)

    def _expected(self, row: Mapping[str, Any]) -> list[Gold]:
        expected = []
        for text in golds(row, "math"):
            try:
                expected.append(gold(text))
            except ValueError as error:
                raise _bad(row, text, error) from None
        return expected


def _mismatch(expected: list[Gold], text: str) -> tuple[str, str]:
    return WRONG_ANSWER, f"expected {expected[0].source!r:.200}, got {text!r:.200}"


def _bad(row: Mapping[str, Any], text: str, error: ValueError) -> BadRow:
    return BadRow(f"row {row['id']}: the answer is {text!r:.100}: {error}")
