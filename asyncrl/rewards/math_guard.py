r"""What is refused before the computer algebra sees it: `9^{9^{9^{9}}}` and `100000000!` hold an interpreter for hours,
in C, where no signal interrupts them. Pure, and linear in the text.

It is a fence against what is easy to write, not a proof: the verifier's process can still be killed at its limit.
"""

from __future__ import annotations

import math
import re
from collections import deque

LONGEST = 1000
"""Characters. A right answer that is longer is right character for character, which needs no algebra."""
DEEPEST = 30  # brackets: the parser recurses
LARGEST_DIGITS = 100_000  # of a power: 10^{100000} takes a millisecond
LARGEST_FACTORIAL = 5_000  # 16,326 digits
LARGEST_CHOICE = 10_000  # either number of a binomial coefficient

TOKEN = re.compile(r"\\[a-zA-Z]+|[0-9]+(?:\.[0-9]+)?|\S")
FACTORIAL = re.compile(r"(?:(?P<of>[0-9]+)|(?P<group>[)}]))\s*!")
CHOICE = re.compile(r"\\[dt]?binom\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}")
OPENING, CLOSING, SIGNS = "([{", ")]}", "+-"


def too_complex(text: str) -> str:
    r"""Why an answer is not computed, "" if it is.

    >>> too_complex("9^{9^{9^{9}}}"), too_complex("x^{10} + 2^{2^{10}}")
    ('a power of more than 100,000 digits', '')
    """
    if len(text) > LONGEST:
        return f"{len(text):,} characters, more than {LONGEST:,}"
    depth = deepest = 0
    for sign in text:
        depth += (sign in OPENING) - (sign in CLOSING)
        deepest = max(deepest, depth)
    if deepest > DEEPEST:
        return f"{deepest} brackets in each other, more than {DEEPEST}"
    for factorial in FACTORIAL.finditer(text):
        if factorial["group"] and not any(sign.isalpha() for sign in text):
            return "the factorial of something computed"
        if factorial["of"] and _value(factorial["of"]) > LARGEST_FACTORIAL:
            return f"the factorial of {factorial['of']:.20}, more than {LARGEST_FACTORIAL:,}"
    for choice in CHOICE.finditer(text):
        if max(map(_value, choice.groups())) > LARGEST_CHOICE:
            return f"a binomial coefficient of more than {LARGEST_CHOICE:,}"
    tokens, digits = deque(TOKEN.findall(text)), 0.0
    while tokens:  # more than once where a bracket is closed that was never opened
        digits += _product(tokens)
    if digits > LARGEST_DIGITS:
        return f"a power of more than {LARGEST_DIGITS:,} digits"
    return ""


def _product(tokens: deque[str]) -> float:
    """The digits that the numbers up to the end, or to a closing bracket, have when they are multiplied, which is more
    than their sum has. A symbol has none: no power of it is computed. Takes the tokens."""
    digits = 0.0
    while tokens:
        if tokens[0] in CLOSING:
            tokens.popleft()
            break
        digits += _power(tokens)
    return digits


def _power(tokens: deque[str]) -> float:
    """The same of the next number, symbol or bracket, raised to what it is raised to."""
    first = tokens.popleft()
    while first in SIGNS and tokens:
        first = tokens.popleft()
    digits = _product(tokens) if first in OPENING else math.log10(1 + _value(first))
    if tokens and tokens[0] == "^":
        tokens.popleft()
        if tokens:
            digits *= 10 ** min(_power(tokens), 12.0)
    return digits


def _value(token: str) -> float:
    """Of a number, as a bound; 0 of anything else."""
    if not token[0].isdecimal():
        return 0.0
    return float(token) if len(token) < 300 else math.inf
