"""Ties vLLM's processes to the collector's: one that is killed with -9 cannot end them, and they keep their memory.

vLLM's worker ends with its engine core, but the engine core with nobody. So a thread in the worker watches the
collector, and ends both.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any

import psutil

OWNER = "ASYNCRL_VLLM_OWNER"
"""Environment variable: the process id of the collector. Without it nobody is watched."""

Process: Any = psutil.Process  # has no types

POLL_S = 1.0
"""How often the worker looks; no system tells a process of the death of its parent's parent."""


def tie() -> None:
    """Begin to watch, in a worker that was started for a collector."""
    owner = os.environ.get(OWNER)
    if owner is None or int(owner) == os.getpid():
        return
    between = list(takewhile(lambda process: process.pid != int(owner), Process().parents()))
    watch = threading.Thread(target=_watch, args=(Process(int(owner)), between), name="asyncrl-tether", daemon=True)
    watch.start()


def _watch(owner: Any, between: Sequence[Any]) -> None:
    while _lives(owner):
        time.sleep(POLL_S)
    for process in between:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    os._exit(1)


def _lives(process: Any) -> bool:
    """Whether it runs: one that is dead but not reaped does not, nor does another of its number."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
