"""What needs computer algebra to be compared: math-verify over SymPy. Importing it takes half a second.

Texts are read here without math-verify's search for an answer in a text, which would take a part of an answer that
cannot be read as a whole; and what it says of numbers, brackets, inequalities and equations is decided here, before or
after it. Its own limits are off: they are whole seconds, and refuse to work elsewhere than in the main thread. Whoever
calls this sets one (`time_limit.py`).
"""

from __future__ import annotations

import logging
import re
from typing import Any

try:
    import math_verify
    from latex2sympy2_extended import NormalizationConfig
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from latex2sympy2_extended.math_normalization import normalize_latex
    from math_verify.grader import should_treat_as_complex
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("the reward part `math` needs math-verify: pip install 'asyncrl[math]'") from error
import sympy

from asyncrl.rewards.math_relation import arranged, described, is_inequality, joined, member_of, without_solution
from asyncrl.rewards.math_value import close, computes_with_infinity, is_value
from asyncrl.rewards.math_written import last_side

logging.getLogger("math_verify").setLevel(logging.ERROR)  # else it warns that its limits are off

# Without `units`, by which 3a and 3ab would be 3: `math_text` takes away those that can be nothing else.
NORMAL = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="none")
CASED, FOLDED = ConversionConfig(lowercase_symbols=False), ConversionConfig()
IMAGINARY = re.compile(r"(?<![a-zA-Z\\])i(?![a-zA-Z])")
UNIT = sympy.Symbol("i", real=False)  # type: ignore[no-untyped-call]  # as the parser reads it
SYMBOL = re.compile(r"\\(?:text|math)[a-z]*\s*\{[^{}]*\}|\\?[a-zA-Z]+")


def parse(text: str, *, cased: bool = False) -> Any:
    """The expression that a `plain` text in LaTeX is; None if it cannot be read. cased: X is not x."""
    if (parts := joined(text)) is not None:
        union, texts = parts
        sets = [described(found) for found in map(parse, texts) if is_inequality(found)]
        if len(sets) == len(texts) and None not in sets:
            whole = (sympy.Union if union else sympy.Intersection)(*sets)
            if whole is not sympy.S.EmptySet:  # "x < 1 and x > 2" is meant as both parts of a union
                return whole
    found = _read(text, cased)
    if found is None and "," not in text and (last := last_side(text)) != text:
        found = _read(last, cased)  # P(A|B) = 1/2
    return found


def mixes_cases(text: str) -> bool:
    r"""Whether a letter occurs both large and small, and so means two things: R and r.

    >>> mixes_cases(r"\frac{R}{r}"), mixes_cases(r"\Delta + d"), mixes_cases("X + y")
    (True, False, False)
    """
    found = SYMBOL.findall(text)
    letters = {one for word in found for one in ([word] if word[0] == "\\" else word)}
    return any(letter != letter.lower() and letter.lower() in letters for letter in letters)


def equal(expected: Any, given: Any, *, braces: bool) -> bool:
    """Whether what was given is what is expected, which comes first: an equation is compared as the row has it.
    An inequality and the interval that it describes are equal, whichever was expected. braces: one of them is written
    as a set, and so in no order. What SymPy cannot compute is not."""
    try:
        return _equal(expected, given, braces=braces)
    except Exception:  # whatever SymPy raises on what a model writes
        return False


def _equal(expected: Any, given: Any, *, braces: bool) -> bool:
    expected, given = member_of(expected), member_of(given)
    if is_value(expected) and is_value(given):
        return close(expected, given)
    if is_inequality(expected) or is_inequality(given):
        sets = [described(one) if is_inequality(one) else one for one in (expected, given)]
        both = is_inequality(expected) and is_inequality(given)
        if both and expected.free_symbols != given.free_symbols:
            return False
        if all(isinstance(one, sympy.Set) and not isinstance(one, sympy.FiniteSet) for one in sets):
            expected, given = sets
        elif not both:
            return False
    if (both_arranged := arranged(expected, given, braces=braces)) is None:
        return False
    expected, given = both_arranged
    if not math_verify.verify([expected], [given], timeout_seconds=0, allow_set_relation_comp=True):
        return False
    return not without_solution(expected, given)


def _read(text: str, cased: bool) -> Any:
    try:
        normal = normalize_latex(text, NORMAL)
        imaginary = IMAGINARY.search(normal) is not None
        found = latex2sympy(
            normal,
            is_real=not (imaginary or should_treat_as_complex(normal)),
            convert_degrees=False,
            normalization_config=None,
            conversion_config=CASED if cased else FOLDED,
        )
        if imaginary and UNIT in getattr(found, "free_symbols", ()) and getattr(found, "lhs", None) != UNIT:
            found = found.xreplace({UNIT: sympy.I})
        return None if computes_with_infinity(found) else found
    except Exception:  # whatever its parser raises, and SymPy of i < 1
        return None
