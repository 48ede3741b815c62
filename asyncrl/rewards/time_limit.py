"""A limit on what one step of a verifier may take, after which the verifier goes on and says so.

It interrupts Python, and what waits, such as `time.sleep`. It does not interrupt a computation in C; for that the
process is killed (`pool.py`), and the answer is unscored.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Literal

TIMERS = {"time": (signal.ITIMER_REAL, signal.SIGALRM), "computing": (signal.ITIMER_PROF, signal.SIGPROF)}
AGAIN_S = 0.1
"""After which what swallowed the first `Late` is interrupted again."""


class Late(BaseException):
    """The time is over. Not an Exception: code that tries one way after the other catches those."""


@contextmanager
def limit(seconds: float, *, of: Literal["time", "computing"] = "time") -> Iterator[None]:
    """Raise Late in here after so many seconds. Only in the main thread, in which a verifier process verifies: no
    other can be interrupted, and elsewhere there is no limit. of: time that passes, or time in which this process
    computes, which is the same on a machine that has other work."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(signum: int, frame: FrameType | None) -> None:
        raise Late

    timer, sent = TIMERS[of]
    before = signal.signal(sent, late)
    signal.setitimer(timer, seconds, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(timer, 0.0)
        signal.signal(sent, before)
