r"""What is not decided by values: answers that have to be written as the row writes them. Pure; texts are `plain`.

A clock is no ratio (3:30 is not 1:10), a numeral has its base, a name of points its order, and where something is left
out between dots nobody can compute. An answer that only says what would have to be computed is none: `\int_0^1 x dx`
would else be the cheapest right answer to the question for it.
"""

from __future__ import annotations

import re
from fractions import Fraction

from asyncrl.rewards.math_text import squeezed

CLOCK = re.compile(r"(?P<hour>\d{1,2})(?::(?P<minute>[0-5]\d))?(?: (?P<half>[ap]m))?")
NUMERAL = re.compile(r"\(?(?P<digits>[0-9A-Z]+)\)?_(?:\{\s*(?:\\text\{)?\s*)?(?P<base>\d+|[a-z]+)\s*\}*")
AS_IT_IS = re.compile(r"\\(?:ldots|angle|triangle|overline|overrightarrow|odot)(?![a-zA-Z])")
RATIO = re.compile(r"\d+(?:\.\d+)?(?:\s*:\s*\d+(?:\.\d+)?){2,}")
PRIME = re.compile(r"[A-Za-z)]'+")
UNDONE = re.compile(
    r"\\(?:i{0,3}nt|oint|sum|prod|lim|max|min|sup|inf|gcd|lcm|det|[bp]?mod|operatorname)(?![a-zA-Z])"
    r"|\\frac\s*\{\s*(?:d|\\partial)[^{}]*\}\s*\{\s*(?:d|\\partial)|\\begin\s*\{vmatrix\}"
)


def as_written(text: str) -> bool:
    r"""Whether a row's answer is one that is not computed with.

    >>> as_written("3:30 pm"), as_written("101_2"), as_written(r"1, 2, \ldots, n"), as_written("3:4")
    (True, True, True, False)
    """
    return bool(_clock(text) or RATIO.fullmatch(text) or NUMERAL.fullmatch(text) or _named(text))


def same_writing(expected: str, text: str) -> bool | None:
    r"""Whether what was given is what is expected, where that is a matter of writing; None where it is not.

    >>> same_writing("3:30", "1:10"), same_writing("101_2", "101"), same_writing("5", r"\sum_{i=1}^5 1")
    (False, True, False)
    >>> same_writing("3:4", "6:8") is None
    True
    """
    clocks = _clock(expected), _clock(text)
    if any(clocks):
        one, other = CLOCK.fullmatch(expected), CLOCK.fullmatch(text)
        if one and other:
            return _time(one) == _time(other) and len({one["half"], other["half"]} - {None}) < 2
        if " " in (clocks[0] or clocks[1] or ""):
            return False  # with am or pm it can be nothing else; 3:30 may be a ratio
    numerals = NUMERAL.fullmatch(expected), NUMERAL.fullmatch(text)
    if any(numerals):
        digits = {found["digits"] if found else other for found, other in zip(numerals, (expected, text), strict=True)}
        return len(digits) == 1 and len({found["base"] for found in numerals if found}) == 1
    ratios = RATIO.fullmatch(expected), RATIO.fullmatch(text)
    if any(ratios):  # 1:2:3; of two numbers it is a fraction
        return all(ratios) and _in_proportion(expected, text)
    if _named(expected) or _named(text) or PRIME.findall(expected) != PRIME.findall(text):
        return squeezed(expected) == squeezed(text)
    if not UNDONE.search(expected) and UNDONE.search(last_side(text)):
        return False
    return None


def last_side(text: str) -> str:
    r"""What stands behind the last equals sign that no bracket is around.

    >>> last_side(r"\sum_{i=1}^{2} i = 1 + 2 = 3")
    ' 3'
    """
    depth = 0
    for place in range(len(text) - 1, -1, -1):
        depth += (text[place] in ")]}") - (text[place] in "([{")
        if text[place] == "=" and depth == 0 and text[place - 1 : place] not in ("<", ">", "!", ":"):
            return text[place + 1 :]
    return text


def _clock(text: str) -> str:
    """A text that can be read as a time of day, "" of any other: 5 alone is a number."""
    found = CLOCK.fullmatch(text)
    return text if found and (found["minute"] or found["half"]) else ""


def _time(found: re.Match[str]) -> tuple[int, int]:
    return int(found["hour"]), int(found["minute"] or 0)


def _in_proportion(expected: str, text: str) -> bool:
    one, other = ([Fraction(part.strip()) for part in ratio.split(":")] for ratio in (expected, text))
    if len(one) != len(other):
        return False
    return all(first * other[0] == second * one[0] for first, second in zip(one, other, strict=True)) and any(other)


def _named(text: str) -> bool:
    return "=" not in text and AS_IT_IS.search(text) is not None
