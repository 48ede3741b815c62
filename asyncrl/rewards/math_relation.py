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


def arranged(expected: Any, given: Any, *, braces: bool) -> tuple[Any, Any] | None:
    """The two as they are to be compared, in order where one of them is a point; None if their brackets alone tell them
    apart. (1, 2) is a point or an interval, and no set. What stands in no brackets may be a point: x = 1, y = 2 in the
    order of the names, 1, 2 in its own."""
    point = isinstance(expected, sympy.Tuple | sympy.Interval) or isinstance(given, sympy.Tuple | sympy.Interval)
    listed = isinstance(expected, sympy.FiniteSet) or isinstance(given, sympy.FiniteSet)
    if not (point and listed):
        one, other = (_named(side) if isinstance(side, sympy.FiniteSet) else None for side in (expected, given))
        if one is not None and other is None and isinstance(given, sympy.FiniteSet) and len(given) == len(one):
            return one, _tuple(*_listed(given))  # 2, 1 is not x = 1, y = 2
        return expected, given
    if braces:
        return None
    found = [_point(side) for side in (expected, given)]
    if isinstance(expected, sympy.Interval) and _named(given) is None:
        return None  # 1, 2 for an interval (1, 2) are its ends, and no answer
    return None if None in found else (found[0], found[1])


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


def _point(found: Any) -> Any:
    if isinstance(found, sympy.Interval):
        return _tuple(found.start, found.end) if found.is_open else None
    if not isinstance(found, sympy.FiniteSet):
        return found
    named = _named(found)
    if named is None and any(isinstance(one, sympy.Eq) for one in found.args):
        return None  # x = 1, x = 2
    return _tuple(*_listed(found)) if named is None else named


def _named(found: Any) -> Any:
    """The point that x = 1, y = 2 is; None of anything else."""
    listed = _listed(found) if isinstance(found, sympy.FiniteSet) else []
    if not listed or not all(isinstance(one, sympy.Eq) and one.lhs.is_Symbol for one in listed):
        return None
    values = {str(one.lhs): one.rhs for one in listed}
    return _tuple(*(values[name] for name in sorted(values))) if 1 < len(values) == len(listed) else None


def _listed(found: Any) -> list[Any]:
    """The elements as they were written."""
    return list(getattr(found, "_unsorted_args", found.args))


def _tuple(*elements: Any) -> Any:
    return sympy.Tuple(*elements)  # type: ignore[no-untyped-call]
