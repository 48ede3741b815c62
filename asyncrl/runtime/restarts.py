"""When a dead collector or store is started again, and when the run gives up. Pure: time and progress are arguments."""

from __future__ import annotations

from collections import deque

LIMIT = 5
"""Restarts without progress that are tried within WINDOW_S; one more ends the run."""

WINDOW_S = 600.0
FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0


class Restarts:
    """The restarts of one process. A step of the learner since the last death is progress and clears the count."""

    def __init__(self) -> None:
        self._deaths: deque[float] = deque()
        self._step = 0
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

    def died(self, now: float, step: int) -> float | None:
        """Seconds to wait before the next start; None: give up. `now` is monotonic, `step` the run's finished steps."""
        if step > self._step:
            self._deaths.clear()
            self._step = step
        while self._deaths and now - self._deaths[0] > WINDOW_S:
            self._deaths.popleft()
        self._deaths.append(now)
        if len(self._deaths) > LIMIT:
            return None
        delay = float(min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (len(self._deaths) - 1)))
        self._next = now + delay
        return delay
