"""When a dead process is started again, and when the run gives up. Pure: time and progress are arguments."""

from __future__ import annotations

from collections import deque

LIMIT = 5
"""Restarts of a collector or a store without progress that are tried within WINDOW_S; one more ends the run."""

WINDOW_S = 600.0
FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0


class Restarts:
    """The restarts of one process. Progress since the last death clears the count: more finished steps of the run, or
    whatever else the process is there for. A death that is longer ago than `window_s` does not count."""

    def __init__(self, limit: int = LIMIT, *, window_s: float = WINDOW_S) -> None:
        self.limit = limit
        self._window_s = window_s
        self._deaths: deque[float] = deque()
        self._progress = 0
        self._next: float | None = None

    @property
    def waiting(self) -> bool:
        """Whether a death is still to be followed by a start."""
        return self._next is not None

    def due(self, now: float) -> bool:
        """Whether the time of that start has come; True once for each death."""
        if self._next is None or now < self._next:
            return False
        self._next = None
        return True

    @property
    def count(self) -> int:
        """Deaths that count now."""
        return len(self._deaths)

    def died(self, now: float, progress: int) -> float | None:
        """Seconds to wait before the next start; None: give up. `now` is monotonic."""
        if progress > self._progress:
            self._deaths.clear()
            self._progress = progress
        while self._deaths and now - self._deaths[0] > self._window_s:
            self._deaths.popleft()
        self._deaths.append(now)
        if len(self._deaths) > self.limit:
            return None
        delay = float(min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (len(self._deaths) - 1)))
        self._next = now + delay
        return delay
