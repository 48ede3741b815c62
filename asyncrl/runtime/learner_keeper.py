"""Keeps a run's learner going: one that died is started again from its newest sound checkpoint, one that failed is not.

A learner that fails says so: it finishes the run in the store, so that collectors end. One that is killed, hangs or has
lost a rank says nothing, and collectors wait for the next one, which begins a new lineage where the checkpoint forks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.buffers.base import Stats
from asyncrl.config.recipe import Recipe, to_builtins
from asyncrl.learners import phase as phases
from asyncrl.learners.phase import LearnerPhase, Phase
from asyncrl.runtime.children import Child, how_it_ended
from asyncrl.runtime.restarts import Restarts
from asyncrl.runtime.signals import SIGNALS
from asyncrl.telemetry.metrics import MetricsWriter


class LearnerKeeper:
    """The learner of the run in `folder`, which may be several processes one after the other. `resume`: the first one
    goes on from a checkpoint too."""

    def __init__(self, recipe: Recipe, folder: Path, *, resume: bool) -> None:
        self.process = _process(folder, resume=resume)
        self._recipe = recipe
        self._folder = folder
        # No window: a run whose checkpoints are an hour apart dies as often in vain as one that makes steps in seconds.
        self._restarts = Restarts(recipe.learner.max_restarts, window_s=math.inf)
        self._saved = 0
        self._begun = False

    @property
    def waiting(self) -> bool:
        """Whether the learner has died and is still to be started again."""
        return self._restarts.waiting

    async def start(self, environment: Mapping[str, str]) -> None:
        """Start the process: the first, or the next one."""
        if self.process.started:
            self.process = _process(self._folder, resume=True)
        self._begun = False
        phases.forget(self._folder)  # what the one before said of itself
        await self.process.start(environment, stdin=msgspec.json.encode(to_builtins(self._recipe)))

    def due(self) -> bool:
        """Whether it is time for the next start; True once for each death."""
        return self._restarts.due(time.monotonic())

    def on_record(self, record: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl."""
        event = record.get("event")
        if event == "start":
            self._begun = True
        elif event == "checkpoint":
            self._saved = int(record["version"])

    def has_died(self, stats: Stats | None) -> bool:
        """Whether the process, which has ended, died; `stats`: of the run, from after its end if the store answers."""
        ended = self._begun and stats is not None and stats.phase == "ended"
        return not ended and died(self.process.exited.result(), phases.read(self._folder))

    def reason(self) -> str:
        """How it died, as one line."""
        code = self.process.exited.result()
        said = self.process.complaint().partition("\n")[0]
        return said or f"the learner {how_it_ended(code)}; its log: {self.process.log}"

    async def plan_restart(self, reason: str) -> bool:
        """End what is left of the process, and say in metrics.jsonl when there will be another one. False where
        `learner.max_restarts` are used up."""
        await self.process.kill()
        delay = self._restarts.died(time.monotonic(), self._saved)
        if delay is None:
            return False
        metrics = MetricsWriter(self._folder / "metrics.jsonl")  # which is nobody's while there is no learner
        count, limit = self._restarts.count, self._restarts.limit
        event = {"event": "restart", "time": time.time(), "reason": reason, "count": count, "limit": limit}
        metrics.write({**event, "delay_s": delay})
        metrics.close()
        return True

    def tried(self) -> list[str]:
        """How often it was started again, as the line before its last words; [] where that is never done."""
        limit = self._restarts.limit
        many = (
            f"the learner died {limit + 1} times without a newer checkpoint in between "
            f"(learner.max_restarts: {limit}); the last time:"
        )
        return [many] if limit else []


def died(code: int, said: LearnerPhase | None) -> bool:
    """Whether a learner that ended with this exit code did so without an end of its own. `said`: its last word."""
    if code == 0 or code - 128 in SIGNALS:  # somebody has asked it to stop
        return False
    return code < 0 if said is None else said.phase is not Phase.ENDED


def _process(folder: Path, *, resume: bool) -> Child:
    arguments = ["learner", "-", "--run-dir", str(folder), *["--resume"] * resume]
    return Child("learner", arguments, log=folder / "logs" / "learner.log")
