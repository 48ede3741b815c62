"""Calls that may never return, made in threads that can be given up.

Collectives and the clients of their store wait in C++ for peers that may be frozen, and not every one of these waits
has a limit. So no thread of ours makes such a call itself: it starts an attempt and waits for that, with a limit. An
attempt that was given up owns all it uses. It ends with its peer, or by the limit of its group, and nobody looks.
"""

from __future__ import annotations

import atexit
import re
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

EXIT_S = 3.0
"""For attempts that are about to end when the process does: C++ that returns while the interpreter is torn down aborts
the process. What is stuck for longer will not return just then."""


class Attempt(Generic[T]):
    """`call` in a thread of its own. `ended` gets this attempt when it has returned or raised."""

    def __init__(self, call: Callable[[], T], *, name: str, ended: SimpleQueue[Attempt[T]] | None = None) -> None:
        self._call = call
        self._ended = ended
        self._result: T
        self._error: BaseException | None = None
        # A daemon: the process must be able to end while it is stuck.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        _running.add(self._thread)
        self._thread.start()

    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def error(self) -> BaseException | None:
        """What `call` raised. Only once it has ended."""
        return self._error

    def result(self) -> T:
        """What `call` returned; raises what it raised. Only once it has ended, or come through `ended`."""
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error
        del self._call  # and with it, in this thread, what only the call has used: a group takes its time to end
        _running.discard(self._thread)
        if self._ended is not None:
            self._ended.put(self)


def first_line(error: BaseException) -> str:
    """What torch says of an error, without the place in its source and without advice.

    >>> first_line(RuntimeError("[/src/pair.cc:7] Read error [::1]:9: Connection reset by peer. Check the logs.\\n..."))
    'Read error [::1]:9: Connection reset by peer'
    """
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+\] ", "", line).partition(". ")[0]


_running: set[threading.Thread] = set()


@atexit.register
def _wait_at_exit() -> None:
    until = time.monotonic() + EXIT_S
    for thread in list(_running):
        thread.join(max(0.0, until - time.monotonic()))
