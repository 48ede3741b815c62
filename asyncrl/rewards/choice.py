"""The reward part `choice`: which letter of a multiple choice an answer names."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from asyncrl.config.rewards import Choice, part_name
from asyncrl.rewards.base import BadRow, Finding
from asyncrl.rewards.exact import CUT_OFF, NO_ANSWER, WRONG_ANSWER
from asyncrl.rewards.math_box import Unclosed, boxed
from asyncrl.rewards.math_text import TEXT, folded

AMBIGUOUS = "ambiguous"

USUAL = 4  # letters, where rows do not say what the options are

ANSWER = re.compile(
    r"(?<!wrong )(?<!incorrect )(?i:\banswer|答案|\bcorrect (?:option|choice|letter|one)|\bI (?:choose|pick|select))"
    r"(?i:\s+is|是)?\W*?[:=：]?\s*(?=(?P<said>[^\n]{0,300}))"
)
LATEST = 20
"""Places where an answer is announced that are looked at, from the end."""
ONE = r"[(\[*]*[A-Z]\b[)\]*]*"
ANOTHER = rf"\s*(?:[,;/&|]|\\\\|\band\b|\bor\b)\s*(?:and\s+|or\s+)?{ONE}|\.?\s*[-+]?\s*{ONE}(?!\s+[a-z])"  # not A dog
ALONE = re.compile(r"(?i:option|choice)?\W*(?P<letter>[A-Za-z])\W*")
LETTER = re.compile(r"\b[A-Z]\b")
LIST = re.compile(rf"(?:(?i:option|choice)s?\s+)?(?P<letters>{ONE}(?:{ANOTHER})*)")
LED_TO = re.compile(rf"\b(?:is|be|it's|pick|choose|option|choice|letter|either|think|but)\s+(?P<list>{LIST.pattern})")
DENIED = re.compile(r"\b(?:not|cannot be|can't be|neither|nor|isn't)\s+(?:(?i:option|choice)\s+)?\(?[A-Z]\b\)?")
OR_ELSE = re.compile(
    r"\b(?:or|also|maybe|perhaps|possibly|alternatively|(?:could|might)(?: also)? be)"
    r"(?:\W{1,3}\w+){0,2}?\W{1,3}([A-Z])\b(?!\s+[a-z'])"
)
MARKED = re.compile(
    r"\b(?i:option|choice) ([A-Z]) is (?:the )?(?:correct|right|best)|\(([A-Z])\)|\*\*\(?([A-Z])\)?[.:)]?\*\*"
    r"|^[ \t]*([A-Z])[.:)](?=\s|$)|^[ \t]*([A-Z])[ \t]*$",
    re.MULTILINE,
)


class ChoiceAnswer:
    """1 if the one letter that the answer names is the row's. Looked for in the last box, or else behind the last
    `answer` that any letter is behind, or else wherever a letter is marked as one: `(B)`, `**B**`, `B.` at the start of
    a line. A Verifier."""

    def __init__(self, part: Choice) -> None:
        self._name = part_name(part)
        self._column = part.options

    def check(self, row: Mapping[str, Any]) -> None:
        self._expected(row, self._options(row))

    def verify(self, row: Mapping[str, Any], answer: Mapping[str, Any]) -> Finding:
        options = self._options(row)
        expected = self._expected(row, options)
        if answer["finish_reason"] != "stop":
            return Finding({self._name: 0.0}, CUT_OFF)
        named = letters(answer["text"], options)
        if len(named) != 1:
            wrong = AMBIGUOUS if named else NO_ANSWER
            return Finding({self._name: 0.0}, wrong, ", ".join(sorted(named)) or "no letter")
        (letter,) = named
        right = letter == expected
        detail = "" if right else f"expected {expected}, got {letter}"
        return Finding({self._name: float(right)}, "" if right else WRONG_ANSWER, detail, letter)

    def _options(self, row: Mapping[str, Any]) -> Sequence[str]:
        """The texts of the options; empty texts where rows do not have them."""
        if self._column is None:
            return [""] * USUAL
        options = row["info"].get(self._column)
        if not isinstance(options, list) or not 2 <= len(options) <= len(ascii_uppercase):
            raise BadRow(
                f"row {row['id']}: {self._column} is {options!r:.100}; `choice` needs a list of 2 to 26 options"
            )
        return [str(option) for option in options]

    def _expected(self, row: Mapping[str, Any], options: Sequence[str]) -> str:
        """The letter that is right: given as such, as a position from 0, or as the text of exactly one option."""
        answer, known = row["answer"], ascii_uppercase[: len(options)]
        if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(options):
            return known[answer]
        if isinstance(answer, str):
            letter = answer.strip().strip("().").upper()
            if len(letter) == 1 and letter in known:
                return letter
            same = [known[n] for n, option in enumerate(options) if option and folded(option) == folded(answer)]
            if len(same) == 1:
                return same[0]
        raise BadRow(
            f"row {row['id']}: the answer is {answer!r:.100}; `choice` needs a letter out of {known}, or a position "
            "from 0, or the text of one option"
        )


def letters(text: str, options: Sequence[str]) -> set[str]:
    r"""The letters that an answer names; several: it does not decide. options: texts, "" where they are not known.

    >>> letters(r"(A) is too small. \boxed{B}", ["1", "2"]), letters("Answer: A or B", ["1", "2"])
    ({'B'}, {'A', 'B'})
    """
    known = dict(zip(ascii_uppercase, (folded(option) for option in options), strict=False))
    try:
        box = boxed(text)
    except Unclosed:
        return set()
    if box is not None:
        text = TEXT.sub(r"\1", box)
        if named := _said(text, known):
            return named
    for found in reversed(deque(ANSWER.finditer(text), maxlen=LATEST)):
        said = TEXT.sub(r"\1", found["said"])
        if named := _said(said, known) or _options(said, known):
            return named
    if (alone := ALONE.fullmatch(text)) and alone["letter"].upper() in known:
        return {alone["letter"].upper()}
    marked = {"".join(ways) for ways in MARKED.findall(text)}
    return known.keys() & marked or _options((text.strip().splitlines() or [""])[-1], known)


def _said(said: str, known: Mapping[str, str]) -> set[str]:
    """The letters that a box, or what stands behind `answer`, begins with or leads to."""
    if (alone := ALONE.fullmatch(said)) and alone["letter"].upper() in known:
        return {alone["letter"].upper()}
    if same := {letter for letter, option in known.items() if option and option == folded(said)}:
        return same
    said = DENIED.sub(" ", said).lstrip(" *_:=#>,$\"'`")
    for first in filter(None, (LIST.match(said), LED_TO.search(said))):
        found = LETTER.findall(first["letters"]) + OR_ELSE.findall(said, first.end("letters"))
        if named := known.keys() & set(found):
            return named
    return set()


def _options(line: str, known: Mapping[str, str]) -> set[str]:
    """The letters of the options whose texts occur in a line, as they are: 12 is not in 12.5."""
    line = folded(line)
    return {
        letter
        for letter, option in known.items()
        if option and re.search(rf"(?<![\w.,-])(?<!\bnot )(?<!n't ){re.escape(option)}(?![\w%]|[.,/]\d)", line)
    }
