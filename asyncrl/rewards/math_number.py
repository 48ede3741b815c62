r"""Numbers as people write them, exactly: never through a float. Pure.

Nearly all answers of nearly all data sets are numbers, and a comparison here takes microseconds where computer algebra
takes milliseconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from asyncrl.rewards.math_guard import LONGEST
from asyncrl.rewards.math_text import squeezed

PLACES = 6
"""Decimal places to which a decimal may round what is expected: 0.333333 is 1/3, and 0.33 is not."""

APART = Fraction(1, 10_000)
"""Of what is expected. To six places 0.0000001 and 0.0000002 are equal; nobody means that."""

DECIMAL = r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+"
TEN = r"[-+]?[0-9]{1,3}"
NUMBER = re.compile(
    rf"""(?P<sign>[-+]?)(?:
        (?P<whole>[0-9]+)?\\frac\{{(?P<minus>-?)(?P<top>{DECIMAL})\}}\{{(?P<bottom>{DECIMAL})\}}
      | 10\^(?P<alone>\{{{TEN}\}}|{TEN})
      | (?P<over>{DECIMAL})/(?P<under>{DECIMAL})
      | (?P<decimal>{DECIMAL})(?:(?:[eE]|(?:\\times|\\cdot|\*)10\^)(?P<ten>\{{{TEN}\}}|{TEN}))?
    )(?P<percent>%)?""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Number:
    """value: without the percent sign. rounded: it is written as a decimal, which may stand for what it rounds."""

    value: Fraction
    percent: bool
    rounded: bool

    def equals(self, answer: Number) -> bool:
        """Whether an answer is this number. A percent sign that only one of them has may be meant either way.

        >>> read("28%").equals(read("28")), read("28%").equals(read("0.28")), read("28").equals(read("0.28"))
        (True, True, False)
        """
        rounded = self.rounded or answer.rounded
        pairs = ((one, other) for one in self._readings(answer) for other in answer._readings(self))
        return any(one == other or (rounded and rounds_to(one, other)) for one, other in pairs)

    def _readings(self, other: Number) -> tuple[Fraction, ...]:
        return (self.value, self.value / 100) if self.percent and not other.percent else (self.value,)


def read(text: str) -> Number | None:
    r"""The number that a `plain` text is; None if it is none, or one with more digits than are worth the time.

    >>> read(r"-2\frac{2}{3}").value, read("1.5 \\times 10^{3}").value, read("x")
    (Fraction(-8, 3), Fraction(1500, 1), None)
    """
    found = NUMBER.fullmatch(squeezed(text)) if len(text) <= LONGEST else None
    if found is None:
        return None
    try:
        if found["alone"]:
            value = Fraction(10) ** int(found["alone"].strip("{}"))
        elif found["decimal"]:
            value = Fraction(found["decimal"]) * Fraction(10) ** int((found["ten"] or "0").strip("{}"))
        else:
            value = Fraction(found["top"] or found["over"]) / Fraction(found["bottom"] or found["under"])
            value = int(found["whole"] or 0) + (-value if found["minus"] else value)
    except ZeroDivisionError:
        return None
    return Number(-value if found["sign"] == "-" else value, bool(found["percent"]), "." in text)


def rounds_to(expected: Fraction, given: Fraction) -> bool:
    """Whether one of them, a decimal, may stand for the other."""
    near = abs(expected - given) <= APART * abs(expected)
    return near and round(expected, PLACES) == round(given, PLACES)
