r"""Whether two numbers that are not written as such, like `2\sqrt{3}`, are equal: by their values, never by what is
left of a difference that was rounded away."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import sympy

from asyncrl.rewards.math_number import rounds_to

ENDLESS = {sympy.oo, -sympy.oo, sympy.zoo, sympy.nan}
DIGITS = 30  # of a value
CANCELLED = sympy.Rational(1, 10**50)
"""Of the larger number, below which a difference is none. SymPy goes on to 100 digits before it says so."""
OF_A_FLOAT = Fraction(1, 10**14)
"""A decimal in a formula has 15 digits, which computing with it does not keep."""


def is_value(found: Any) -> bool:
    """A finite number that is no percentage, which may be meant in two ways (math-verify knows)."""
    return (
        isinstance(found, sympy.Expr)
        and bool(found.is_number)
        and not found.has(sympy.core.expr.UnevaluatedExpr, sympy.oo, -sympy.oo, sympy.zoo, sympy.nan)
    )


def computes_with_infinity(found: Any) -> bool:
    """Whether infinity is in a sum, product, power or function. What is taken from one may be 0 for SymPy, by which
    oo**2 * e would be every row's answer."""
    nodes = sympy.preorder_traversal(found) if isinstance(found, sympy.Basic) else ()  # type: ignore[no-untyped-call]
    return any(
        isinstance(node, sympy.Add | sympy.Mul | sympy.Pow | sympy.Function)
        and node != -sympy.oo
        and _signless(node) is not sympy.oo
        for node in nodes
        if ENDLESS & set(node.args)
    )


def _signless(node: Any) -> Any:
    return node.args[1] if node.is_Mul and len(node.args) == 2 and node.args[0] == -1 else node


def close(expected: Any, given: Any) -> bool:
    """Whether two such numbers are equal; where one has a decimal, whether that rounds the other."""
    expected, given = expected.doit(), given.doit()
    if not (is_value(expected) and is_value(given)):
        return False
    if expected.has(sympy.Float) or given.has(sympy.Float):
        pairs = zip(expected.evalf(DIGITS).as_real_imag(), given.evalf(DIGITS).as_real_imag(), strict=True)
        return all(_near(Fraction(str(one)), Fraction(str(other))) for one, other in pairs)
    if expected.is_Rational and given.is_Rational:
        return bool(expected == given)
    difference = (expected - given).evalf(15, maxn=200)
    return bool(abs(difference) <= CANCELLED * max(abs(expected.evalf(15)), abs(given.evalf(15))))


def _near(expected: Fraction, given: Fraction) -> bool:
    return rounds_to(expected, given) or abs(expected - given) <= OF_A_FLOAT * abs(expected)
