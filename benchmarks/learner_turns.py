"""Sides of a comparison that take turns in this process, each for as long as one thread computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch


def cpu_seconds(sides: Mapping[str, Callable[[], None]], *, turns: int) -> dict[str, float]:
    """Median CPU seconds of each side, which a machine that does other work beside it stretches little. Who is first is
    last in the next turn."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for turn in range(turns):
            for name in list(sides)[:: 1 if turn % 2 == 0 else -1]:
                start = time.process_time()
                sides[name]()
                found[name].append(time.process_time() - start)
    finally:
        torch.set_num_threads(threads)
    return {name: median(seconds) for name, seconds in found.items()}
