"""What kind of thing an expression is, where math-verify takes one for the other: an inequality for the ends of its
interval, a point for a set, two equations without a solution for one another."""

from __future__ import annotations

import re
from typing import Any

import sympy
from latex2sympy2_extended.logic import And
from sympy.core.relational import Relational

WORD = re.compile(
    r",?\s*(?:\\text\s*\{\s*(or|and)\s*\}|(?<![a-zA-Z\\])(or|and)(?![a-zA-Z])|\\(lor|land|vee|wedge)(?![a-zA-Z]))\s*"
)
OR = {"or", "lor", "vee"}


def joined(text: str) -> tuple[bool, list[str]] | None:
    r"""Statements that words join: whether by `or`, and which. None without words, or with both.

    >>> joined(r"x < 1 \text{ or } x > 2")
    (True, ['x < 1', 'x > 2'])
    """
    words = {"".join(filter(None, found)) in OR for found in WORD.findall(text)}
    return (words.pop(), WORD.sub("\n", text).split("\n")) if len(words) == 1 else None


def is_inequality(found: Any) -> bool:
    """One, or a chain of which one is: 1 < x < 2."""
    if isinstance(found, And):
        return all(isinstance(one, Relational) for one in found.args) and any(map(is_inequality, found.args))
    return isinstance(found, Relational) and not isinstance(found, sympy.Eq)


def described(found: Any) -> sympy.Set | None:
    """The real numbers for which an inequality in one variable is true; None if it has none or several, or if SymPy
    cannot solve it."""
    if len(found.free_symbols) != 1:
        return None
    try:
        parts = found.args if isinstance(found, And) else (found,)
        return sympy.Intersection(*(part.as_set() for part in parts))  # type: ignore[no-untyped-call]
    except Exception:  # NotImplementedError, and what solvers raise
        return None


def member_of(found: Any) -> Any:
    """The set of `x in a set`, and anything else as it is."""
    return found.rhs if isinstance(found, sympy.Eq) and isinstance(found.rhs, sympy.Set) else found


def kinds_differ(expected: Any, given: Any, *, braces: bool) -> bool:
    """Whether two are told apart by their brackets alone: (1, 2) is a point or an interval and no set, and what stands
    in no brackets is in the row's order if it is to be a point."""
    pair, other = (expected, given) if _ordered(expected) else (given, expected)
    if not _ordered(pair) or not isinstance(other, sympy.FiniteSet):
        return False
    elements = list(getattr(other, "_unsorted_args", other.args))
    if not all(isinstance(one, sympy.Eq) and one.lhs.is_Symbol for one in elements):
        # 1, 2 for an interval (1, 2) are its ends, and no answer
        return braces or isinstance(expected, sympy.Interval) or elements != _elements(pair)
    names = [str(one.lhs) for one in elements]
    return names != sorted(set(names)) or braces  # x = 1, y = 2 is a point, x = 1, x = 2 is none


def without_solution(expected: Any, given: Any) -> bool:
    """Whether two equations are equal for math-verify only as neither has a solution."""
    if not (isinstance(expected, sympy.Eq) and isinstance(given, sympy.Eq)):
        return False
    if not all(isinstance(side, sympy.Expr) for one in (expected, given) for side in (one.lhs, one.rhs)):
        return False  # x in a set
    one, other = expected.lhs - expected.rhs, given.lhs - given.rhs
    if sympy.simplify(one - other) == 0 or sympy.simplify(one + other) == 0:
        return False
    return not sympy.solve(expected, expected.free_symbols)  # type: ignore[no-untyped-call]


def _ordered(found: Any) -> bool:
    return isinstance(found, sympy.Tuple) or (isinstance(found, sympy.Interval) and bool(found.is_open))


def _elements(pair: Any) -> list[Any]:
    return [pair.start, pair.end] if isinstance(pair, sympy.Interval) else list(pair.args)
