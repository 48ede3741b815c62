"""A collector that gets stuck in one phase of the second weights it takes: `slow_collector.py PHASE ARGUMENTS`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any

from asyncrl.cli.main import main
from asyncrl.collectors.engines.simulated import SimulatedEngine
from asyncrl.weights import shm

STUCK_S = 600.0


def stuck_in(phase: str) -> None:
    """In the announce phase, which has no code to get stuck in, only a stopped process is."""
    receiver, engine = shm.ShmReceiver, SimulatedEngine
    fetch, activate = receiver.stage, engine.activate

    def stage(self: shm.ShmReceiver, offer: Any, **how: Any) -> Any:
        if offer["version"] > 0:
            time.sleep(STUCK_S)
        return fetch(self, offer, **how)

    async def activated(self: SimulatedEngine, kv: Any = "keep", *, exchanged: Callable[[], None] | None = None) -> Any:
        if self.serving is not None:
            if phase == "verify" and exchanged is not None:
                exchanged()
            await asyncio.sleep(STUCK_S)
        return await activate(self, kv, exchanged=exchanged)

    if phase == "stage":
        receiver.stage = stage  # type: ignore[method-assign]
    elif phase in ("activate", "verify"):
        engine.activate = activated  # type: ignore[method-assign]


if __name__ == "__main__":
    stuck_in(sys.argv.pop(1))
    main()
