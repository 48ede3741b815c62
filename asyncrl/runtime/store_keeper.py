"""Keeps an embedded store alive: one that was killed (the kernel short of memory, somebody's kill -9) is started again.

It comes back with its data and at its address, and everybody who needs it waits for it (`buffers/patience.py`), so that
nobody has to be told.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from asyncrl.buffers.server import EmbeddedServer
from asyncrl.runtime.restarts import LIMIT, WINDOW_S, Restarts

TICK_S = 0.5
"""How often to look after it, where nothing else sets the pace."""


class StoreKeeper:
    """Looks after `server`, telling `say` of each death."""

    def __init__(self, server: EmbeddedServer, say: Callable[[str], None]) -> None:
        self._server = server
        self._say = say
        self._restarts = Restarts()

    @property
    def down(self) -> bool:
        """Whether it is dead and not started again yet."""
        return self._restarts.waiting

    def tend(self, step: int = 0) -> str | None:
        """Start the server again if it is time to; to be called about every TICK_S. `step`: the run's finished steps,
        where they are known: one in between clears the count of deaths. Returns why it is given up, else None."""
        now = time.monotonic()
        if self._restarts.waiting:
            if self._restarts.due(now):
                self._server.restart()
            return None
        code = self._server.returncode
        if code is None:
            return None
        delay = self._restarts.died(now, step)
        if delay is None:
            return (
                f"the store ended {self._restarts.count} times in {WINDOW_S / 60:.0f} minutes, the last time with "
                f"code {code}; its log: {self._server.log}"
            )
        self._say(
            f"the store ended with code {code}; starting it again in {delay:.0f} s with its data "
            f"({self._restarts.count} of {LIMIT}); its log: {self._server.log}"
        )
        return None
