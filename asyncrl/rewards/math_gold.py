r"""What a row expects, read once for all of its answers.

Either a text with a box, of which the box counts, as in MATH's solutions; or one that ends in `#### 42`, as in GSM8K's;
or the bare answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from asyncrl.rewards import math_algebra
from asyncrl.rewards.math_box import content
from asyncrl.rewards.math_guard import too_complex
from asyncrl.rewards.math_number import Number, read
from asyncrl.rewards.math_text import TEXT, folded, plain, squeezed
from asyncrl.rewards.math_written import as_written
from asyncrl.rewards.time_limit import Late, limit

LETTER = re.compile(r"\(?[A-Z]\)?")
WORDS = re.compile(r"(?:no|[^\W\d_]{3,}(?:[ '-]+[^\W\d_]+)*)", re.IGNORECASE)


@dataclass(frozen=True)
class Gold:
    """source: as in the row. text: in one way of writing. said: where it is text, not mathematics, what it says."""

    source: str
    text: str
    number: Number | None
    said: str | None

    @cached_property
    def parsed(self) -> Any:
        """For the computer algebra. Raises ValueError if no answer could be compared with it, not even itself."""
        if reason := too_complex(self.text):
            raise ValueError(f"not computed: {reason}")
        found = math_algebra.parse(self.text, cased=math_algebra.mixes_cases(self.text))
        if found is None:
            raise ValueError("no mathematical expression: give formulas in LaTeX, words in \\text{...}")
        if not math_algebra.equal(found, found, braces=False):
            raise ValueError("it is not even equal to itself for math-verify")
        return found

    def is_written(self, text: str) -> bool:
        """Whether a `plain` answer is this one already as text."""
        return squeezed(text) == squeezed(self.text) or (self.said is not None and folded(text) == self.said)

    def check(self, limit_s: float) -> None:
        """Raise ValueError if it cannot be compared with, or if reading it takes longer than `limit_s`."""
        if self.number is not None or self.said is not None or as_written(self.text):
            return
        try:
            with limit(limit_s, of="computing"):
                _ = self.parsed
        except Late:
            raise ValueError(f"reading it takes longer than {limit_s:g} s") from None


@lru_cache(maxsize=1024)
def gold(source: str) -> Gold:
    r"""Raises ValueError if it is no mathematics.

    >>> gold(r"Thus \boxed{1{,}000}.").text, gold("9 * 8 = 72\n#### 72").text
    ('1000', '72')
    """
    text = plain(content(source).rpartition("####")[2])
    if not text:
        raise ValueError("nothing is left of it")
    if LETTER.fullmatch(text):
        raise ValueError("the letter of a choice: use {type: choice}")
    if WORDS.fullmatch(text):
        raise ValueError("words: use {type: exact} or {type: f1}, or write \\text{...}")
    marked = TEXT.fullmatch(text) is not None and not any(sign.isdigit() for sign in text)
    if marked and not folded(text):
        raise ValueError("nothing is left of it")
    return Gold(source, text, read(text), folded(text) if marked else None)


@lru_cache(maxsize=4096)
def compared(expected: Gold, text: str) -> bool | None:
    """Whether a `plain` text is what is expected, by algebra; None if it is no expression. Kept, as the answers of a
    group are often the same."""
    cased = math_algebra.mixes_cases(expected.text) or math_algebra.mixes_cases(text)
    given = math_algebra.parse(text, cased=cased)
    if given is None:
        return None
    wanted = math_algebra.parse(expected.text, cased=True) if cased else expected.parsed
    return math_algebra.equal(wanted, given, braces="\\{" in expected.text or "\\{" in text)
