"""From what a verifier returned to reward parts, a reward, or the name of what is wrong. Pure.

A reward of 0 says that the answer is bad. A verifier that fails says nothing about the answer, so every failure makes
the member *unscored*, and each kind has its own name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from asyncrl.rewards.base import Finding

RAISED = "verifier_raised"  # an exception of the task's
TIMEOUT = "verifier_timeout"  # longer than the limit; its process was killed
NAN = "verifier_nan"  # a part is NaN
NONE = "verifier_none"  # a part, or the whole, is None
DIED = "verifier_died"  # the process ended during the call
MEMORY = "verifier_memory"  # more memory than collector.score_memory_limit
BAD_ROW = "bad_row"  # nothing could be scored against this row
INVALID = "verifier_invalid"  # not numbers, too many, no or other parts, infinite, or a row that cannot be sent
FAILURES = (RAISED, TIMEOUT, NAN, NONE, DIED, MEMORY, BAD_ROW, INVALID)

LONGEST_DETAIL = 500
"""Characters: what is logged, kept in the record and shown; an answer may hold megabytes."""

_CLASS = re.compile(r"[a-z][a-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Parts by name (None where one has no finite number); `failure`: why it is unscored, "" if it is scored;
    `wrong`: the class of what is wrong with a scored answer, "" if nothing is; what a person should know of it;
    `read`: what was taken for the answer, "" for its whole text; `by`: a part of the verifier that named the class."""

    parts: dict[str, float | None]
    failure: str = ""
    detail: str = ""
    wrong: str = ""
    read: str = ""
    by: str = ""


def judge(returned: object) -> Verdict:
    """What a task's `score` returned, checked: a number is the part "reward", a mapping is parts by name, a `Finding`
    is parts and the class of what is wrong.

    Anything with `__float__` is a number: bool, int, Fraction, a NumPy scalar, a tensor with one element. When several
    parts are bad, the failure is the first's; the good ones are kept for the record.
    """
    if isinstance(returned, Verdict):
        return returned
    if isinstance(returned, Finding):
        verdict = judge(returned.parts)
        if verdict.failure:
            return verdict
        if returned.wrong and not _CLASS.fullmatch(str(returned.wrong)):
            complaint = f"the class of what is wrong is {returned.wrong!r:.100}: write one like 'wrong_answer'"
            return Verdict(verdict.parts, INVALID, complaint)
        by = next(iter(verdict.parts), "") if returned.wrong else ""
        return replace(verdict, wrong=returned.wrong, detail=short(returned.detail), read=short(returned.read), by=by)
    if (count := _count(returned)) is not None:
        complaint = f"score returned {count} values ({type(returned).__name__}); it is called once for each answer: "
        return Verdict({"reward": None}, INVALID, complaint + "return one number, or parts by name")
    named = returned if isinstance(returned, Mapping) else {"reward": returned}
    if not named:
        return Verdict({}, INVALID, "score returned a mapping without parts")
    parts: dict[str, float | None] = {}
    failure = detail = ""
    for name, value in named.items():
        if not isinstance(name, str):
            return Verdict({}, INVALID, f"the name of a reward part is {name!r}, not a string")
        parts[name], fault, complaint = _number(value)
        if fault and not failure:
            failure, detail = fault, f"part {name!r} {complaint}"
    return Verdict(parts, failure, detail)


def short(detail: object) -> str:
    """What is kept of a detail: no more than `LONGEST_DETAIL` characters, and none that cannot be sent.

    >>> short("half a pair: \\ud800")
    'half a pair: \\\\ud800'
    """
    text = str(detail)
    text = text if len(text) <= LONGEST_DETAIL else text[: LONGEST_DETAIL - 3] + "..."
    return text.encode(errors="backslashreplace").decode()


def _count(returned: object) -> int | None:
    """How many values were returned where one was due; None for a number (a tensor with one element is one) and for
    what is no collection of values."""
    if isinstance(returned, Mapping | str | bytes):
        return None
    try:
        count = len(returned)  # type: ignore[arg-type]  # asked, not known
    except Exception:  # no length, or an array without dimensions
        return None
    return None if count == 1 and hasattr(type(returned), "__float__") else count


def _number(value: object) -> tuple[float | None, str, str]:
    if value is None:
        return None, NONE, "is None"
    if not hasattr(type(value), "__float__"):
        return None, INVALID, f"is a {type(value).__name__}, not a number"
    try:
        number = float(value)  # type: ignore[arg-type]  # has __float__
    except Exception as error:  # an int beyond 1e308, a tensor with several elements, or the type's own fault
        return None, INVALID, f"is not a float: {type(error).__name__}: {error}"
    if math.isnan(number):
        return None, NAN, "is NaN"
    if math.isinf(number):
        return None, INVALID, "is infinite"
    return number, "", ""


def odd_names(parts: Iterable[str], expected: Iterable[str] | None, weights: Iterable[str]) -> str:
    """What is wrong with the names of a score's parts, "" if nothing. `expected`: those of the first score, if any.

    A part that only some answers have would be 0 for the others without anybody having said so, and a weight whose part
    never comes is a misspelled one.
    """
    names = set(parts)
    if expected is not None and names != set(expected):
        return (
            f"score returned the parts {_list(names)}, and for the first answer {_list(expected)}: "
            "return the same parts for each answer, 0.0 where one was not earned"
        )
    if unknown := set(weights) - names:
        return f"part_weights() has {_list(unknown)}, and score returned {_list(names)}: give both the same names"
    return ""


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))


def joined(verdicts: Sequence[Verdict], order: Sequence[str] = ()) -> Verdict:
    """One verdict of several: all parts; the first failure, or else the first class of what is wrong, with its detail;
    and what the first one that says so took for the answer. order: of parts, by which classes are first; one of a part
    that is not in it, such as the task's own, comes before all.

    >>> form, tool = Verdict({"form": 0.0}, wrong="wrong_format", by="form"), Verdict({"b": 0.0}, wrong="late", by="b")
    >>> joined([form, tool]).wrong, joined([form, tool], order=["b", "form"]).wrong
    ('wrong_format', 'late')
    """
    if len(verdicts) == 1:
        return verdicts[0]
    parts: dict[str, float | None] = {}
    for verdict in verdicts:
        if shared := parts.keys() & verdict.parts.keys():
            complaint = f"two parts are called {sorted(shared)[0]!r}: give one of them another `name` in task.rewards"
            return Verdict(parts, INVALID, complaint)
        parts.update(verdict.parts)
    failed = next((verdict for verdict in verdicts if verdict.failure), None)
    if failed is not None:
        return Verdict(parts, failed.failure, failed.detail)
    wrong = [verdict for verdict in verdicts if verdict.wrong] or [verdicts[0]]
    said = min(wrong, key=lambda verdict: order.index(verdict.by) if verdict.by in order else -1)
    read = next((verdict.read for verdict in verdicts if verdict.read), "")
    return Verdict(parts, "", said.detail, said.wrong, read, said.by)


def weighted_sum(parts: Mapping[str, float | None], weights: Mapping[str, float]) -> float:
    """sum of weight x part, a part without a weight weighing 1; NaN if any part has no number."""
    return sum(math.nan if part is None else weights.get(name, 1.0) * part for name, part in parts.items())


def check_weights(weights: object) -> dict[str, float]:
    """Part weights as a plain dict of finite floats. Raises ValueError naming the weight that is not one."""
    if not isinstance(weights, Mapping):
        raise ValueError(f"part_weights() returned a {type(weights).__name__}: return a mapping from part to weight")
    verdict = judge(weights) if weights else Verdict({})
    if verdict.failure:
        raise ValueError(f"part_weights(): {verdict.detail}: each weight must be a finite number")
    return {name: weight for name, weight in verdict.parts.items() if weight is not None}
