"""math-verify, within a limit: what needs computer algebra to be compared. Importing it takes half a second.

Its own limits are off: they are whole seconds, and refuse to work elsewhere than in the main thread. Neither they nor
`limit` interrupts a computation in C; for that the process is killed (`pool.py`).
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

try:
    import math_verify
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("the reward part `math` needs math-verify: pip install 'asyncrl[math]'") from error

logging.getLogger("math_verify").setLevel(logging.ERROR)  # else it warns that its limits are off

AGAIN_S = 0.1
"""After which what swallowed the first `Late` is interrupted again."""

_LATEX = [math_verify.LatexExtractionConfig(boxed_match_priority=-1)]


class Late(BaseException):
    """The time is over. Not an Exception: libraries that try one way after the other catch those."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise Late in here after so many seconds. Only in the main thread, in which a verifier process verifies: no
    other can be interrupted, and elsewhere there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(signum: int, frame: FrameType | None) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def parse(text: str) -> list[Any]:
    """The expressions of a `plain` text in LaTeX; none if it cannot be read."""
    found: list[Any] = math_verify.parse(f"${text}$", _LATEX, fallback_mode="no_fallback", parsing_timeout=0)
    return found


def equal(expected: list[Any], given: list[Any]) -> bool:
    """Whether what was given is what was expected, which comes first: an equation is compared as the row has it.
    An inequality and the interval that it describes are equal, whichever was expected."""
    return bool(math_verify.verify(expected, given, timeout_seconds=0, allow_set_relation_comp=True))
