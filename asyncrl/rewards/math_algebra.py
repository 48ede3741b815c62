"""math-verify: what needs computer algebra to be compared. Importing it takes half a second.

Its own limits are off: they are whole seconds, and refuse to work elsewhere than in the main thread. Whoever calls this
sets one (`time_limit.py`).
"""

from __future__ import annotations

import logging
from typing import Any

try:
    import math_verify
    from latex2sympy2_extended import NormalizationConfig
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("the reward part `math` needs math-verify: pip install 'asyncrl[math]'") from error

logging.getLogger("math_verify").setLevel(logging.ERROR)  # else it warns that its limits are off

_LATEX = [
    math_verify.LatexExtractionConfig(
        boxed_match_priority=-1,
        # Without `units`, by which 3a and 3ab would be 3: `math_text` takes away those that can be nothing else.
        normalization_config=NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True),
    )
]


def parse(text: str) -> list[Any]:
    """The expressions of a `plain` text in LaTeX; none if it cannot be read."""
    found: list[Any] = math_verify.parse(f"${text}$", _LATEX, fallback_mode="no_fallback", parsing_timeout=0)
    return found


def equal(expected: list[Any], given: list[Any]) -> bool:
    """Whether what was given is what was expected, which comes first: an equation is compared as the row has it.
    An inequality and the interval that it describes are equal, whichever was expected."""
    return bool(math_verify.verify(expected, given, timeout_seconds=0, allow_set_relation_comp=True))
