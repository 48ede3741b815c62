"""What the learner does right now, in the run folder's learner.json: `asyncrl status` reads it without asking anybody.

The store sees a learner only when it calls: a learner that trains, publishes or hangs is silent there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from enum import StrEnum
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)

FILE = "learner.json"

SETTLED_S = 0.25
"""A phase is written once it has lasted so long: nobody can see shorter ones, and a small model's step has three of a
few milliseconds each."""


class Phase(StrEnum):
    """One thing after another; `asyncrl status` shows the word."""

    STARTING = "starting"
    PUBLISHING = "publishing"
    LEASING = "leasing"
    TRAINING = "training"
    CHECKPOINTING = "checkpointing"
    EVALUATING = "evaluating"  # waiting for the evaluations at the end
    ENDED = "ended"


class LearnerPhase(msgspec.Struct, frozen=True, kw_only=True):
    """The file's content. step: the one being made, counted from 1, 0 before it is known; since: unix seconds."""

    phase: Phase
    step: int
    since: float
    pid: int
    host: str


class PhaseFile:
    """The learner's own side."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE
        self._settling: asyncio.TimerHandle | None = None

    def enter(self, phase: Phase, *, step: int = 0) -> None:
        """From now on the learner is in `phase`; the file says so after SETTLED_S, of the first and the last phase at
        once. A reader sees the old file or the new one, never half of one.

        A disk that is full is only logged: this ends no run, and hides no other error.
        """
        if self._settling is not None:
            self._settling.cancel()
        now = LearnerPhase(phase=phase, step=step, since=time.time(), pid=os.getpid(), host=socket.gethostname())
        if phase in (Phase.STARTING, Phase.ENDED):
            self._write(now)
        else:
            self._settling = asyncio.get_running_loop().call_later(SETTLED_S, self._write, now)

    def _write(self, now: LearnerPhase) -> None:
        temporary = self._path.with_suffix(".tmp")
        try:
            temporary.write_bytes(msgspec.json.encode(now))
            temporary.replace(self._path)
        except OSError as error:
            log.warning("`asyncrl status` will not know that the learner is %s: %s", now.phase, error)


def forget(run_dir: Path) -> None:
    """A new learner is about to start: what the one before said of itself is not about it."""
    (run_dir / FILE).unlink(missing_ok=True)


def read(run_dir: Path) -> LearnerPhase | None:
    """What the learner of this folder last said; None if it never said anything. Raises ValueError for a file that
    something else wrote."""
    try:
        content = (run_dir / FILE).read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(content, type=LearnerPhase)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{run_dir / FILE} is not what a learner writes: {error}") from None
