"""What a judge said: from its reply to a number in [0, 1]. Pure.

Whatever is not clearly a verdict is none: a number that was meant otherwise would be a wrong reward, while an answer
without a verdict is only left out.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

_DIGITS = r"[0-9]+(?:\.[0-9]+)?"
_LAST_NUMBER = re.compile(
    rf"(?<![\w.,/-])(?P<number>[-−]?{_DIGITS})(?:[\s*_`]*(?:/|out of|of)\s*(?P<of>{_DIGITS}))?[\s.*_`)\]}}$]*\Z",
    re.IGNORECASE,
)
"""At the end, aside from what closes a sentence or an emphasis. No part of a word, a range, a date or "7,5"."""

_LABEL = re.compile(
    r"(?:\A|(?<![0-9])[:：\]]|[=-]>|\b(?:score|verdict|rating|grade|mark|result|overall|total)(?:\s+(?:is|of)|\s*=)?|\bsay)"
    r"[\s*_`$>(\[{]*(?:\\boxed\{)?\Z",
    re.IGNORECASE,
)
"""What may stand right before it in its line. Whatever else does may say that it is something else: "7 (from 1 to 10)",
"7 or 8", "so it is not a 10"."""

_GIVES = re.compile(r"\b(?:rate|give|assign|award|deserves?|score|grade|verdict|rating)\b", re.IGNORECASE)
_UNSURE = re.compile(
    r"[0-9]|n['’]t\b|\b(?:not?|never|cannot|without|if|unless|than|below|under|above|over|between|from|to|or)\b",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"[.;!?]\s")

_OPENING = re.compile(r"^[ \t]*\{", re.MULTILINE)
"""An object begins a line: one inside of another that was not finished does not count."""

TAIL = 200  # characters in which the number is looked for: the last line has a few
SHOWN = 60  # of that line, in what is said of it
LONGEST = 10_000  # characters in which the object is looked for: a verdict with its reason has some hundred


class Unreadable(Exception):
    """No verdict can be read; the message says why, for the judge and for a person."""


def verdict(reply: str, form: Literal["number", "json"], scale: tuple[float, float]) -> float:
    """The number in a reply, from [low, high] to [0, 1]. Raises Unreadable.

    >>> verdict("It is right, but long.\\n\\n**7**", "number", (1, 10))
    0.6666666666666666
    >>> verdict('```json\\n{"reason": "none {so far}", "score": 3}\\n```', "json", (1, 5))
    0.5
    """
    low, high = scale
    number = _number(reply, high) if form == "number" else _score(reply)
    if not low <= number <= high:
        raise Unreadable(f"{number:g} is not on the scale from {low:g} to {high:g}")
    return (number - low) / (high - low)


def _number(reply: str, high: float) -> float:
    line = _said(reply).rstrip()[-TAIL:].rpartition("\n")[2]
    found = _LAST_NUMBER.search(line)
    if found is None:
        raise Unreadable("it does not end with a number")
    if not _leads_to(line[: found.start()]):
        raise Unreadable(f"its last line is not the verdict alone: {line[-SHOWN:]!r}")
    if found["of"] is not None and float(found["of"]) != high:
        raise Unreadable(f"it ends with {found['number']} out of {found['of']}, and the scale ends at {high:g}")
    return float(found["number"].replace("−", "-"))


def _leads_to(before: str) -> bool:
    """What stands before a number says that it is the verdict, as in "Score: " or "So I would give it a "."""
    sentence = _SENTENCE.split(before)[-1]
    return bool(_LABEL.search(before)) or bool(_GIVES.search(sentence) and not _UNSURE.search(sentence))


def _score(reply: str) -> float:
    """`score` of the JSON object that the reply ends with."""
    body = _said(reply)[-LONGEST:].strip().removesuffix("```").rstrip()
    for start in _OPENING.finditer(body):  # from the outermost; what only looks like one does not reach the end
        try:
            value, end = STRICT.raw_decode(body, start.end() - 1)
        except (ValueError, RecursionError):
            continue
        if end == len(body):
            break
    else:
        raise Unreadable("it does not end with a JSON object that has each key once")
    score = value.get("score")
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise Unreadable("its JSON object has no number `score`")
    try:
        return float(score)
    except OverflowError:
        raise Unreadable("`score` has hundreds of digits") from None


def _said(reply: str) -> str:
    """Without what a reasoning model thought before, where its server leaves that in."""
    _, closed, said = reply.rpartition("</think>")
    if not closed and reply.lstrip().startswith("<think>"):
        raise Unreadable("it ends before it has ended thinking (</think>)")
    return said


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a key that stands twice nobody knows which was meant."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found


def _never(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


STRICT = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_never)
