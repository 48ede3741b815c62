"""From what a verifier returned to reward parts, a reward, or the name of what is wrong. Pure.

A reward of 0 says that the answer is bad. A verifier that fails says nothing about the answer, so every failure makes
the member *unscored*, and each kind has its own name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

RAISED = "verifier_raised"  # an exception of the task's
TIMEOUT = "verifier_timeout"  # longer than the limit; its process was killed
NAN = "verifier_nan"  # a part is NaN
NONE = "verifier_none"  # a part, or the whole, is None
DIED = "verifier_died"  # the process ended during the call
INVALID = "verifier_invalid"  # not numbers, no parts, infinite, or a row that cannot be sent to the process
FAILURES = (RAISED, TIMEOUT, NAN, NONE, DIED, INVALID)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Parts by name (None where one has no finite number), the failure's class ("" = none), and what to log of it."""

    parts: dict[str, float | None]
    failure: str = ""
    detail: str = ""


def judge(returned: object) -> Verdict:
    """What a task's `score` returned, checked: a number is the part "reward", a mapping is parts by name.

    Anything with `__float__` is a number: bool, int, Fraction, a NumPy scalar, a tensor with one element. When several
    parts are bad, the failure is the first's; the good ones are kept for the record.
    """
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
