"""The run that `bench soak` kills: its settings, and the points where it can be struck."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from asyncrl.benchmarks.soak_child import FOLDER, MODULE
from asyncrl.benchmarks.watched_run import HANG_S, WatchedRun

OUTSIDE = ("store", "launcher")
"""What is killed from outside: neither works in phases of its own."""

ENDING = ("launcher",)
"""Phases of processes whose end is the run's end; all others are started again by the launcher."""

GROUPS_PER_STEP, GROUP_SIZE = 4, 4

SETTINGS: dict[str, Any] = {
    "run.name": "soak",
    "run.no_progress_s": 100,
    "collector.group_timeout_s": 30,
    "collector.engine": "{type: simulated, slots: 32, token_s: 0.005, mean_tokens: 8, cv: 0.7}",
    "collector.group_size": GROUP_SIZE,
    "learner.groups_per_step": GROUPS_PER_STEP,
    "learner.learning_rate": 1e-5,
    "buffer.max_trajectory_age": 1,
    "eval.at_start": "false",
    "eval.at_end": "false",
}
"""Small, since starting takes the time: 200 kills are 200 starts. The answers are of a simulated engine; they teach
nothing, and fit into the model's length."""

ENDLESS = 1_000_000  # steps of a run that is to be killed; `end_after` gives it an end

STRIKE_S = 60.0  # from arming a point until somebody reaches it: each is passed in every step or two


class SoakRun(WatchedRun):
    """A run that is killed at points it names itself (`soak_child`)."""

    def __init__(self, folder: Path, *, sabotage: str, every_steps: int, ranks: int) -> None:
        self._faults = folder / "faults"
        super().__init__(folder, module=MODULE, environment={FOLDER: str(self._faults)})
        self._faults.mkdir()
        if sabotage:
            (self._faults / sabotage).touch()
        self._settings = {**SETTINGS, "learner.checkpoint.every_steps": every_steps, "learner.ranks": ranks}

    def begin(self, max_steps: int) -> None:
        """Start it from the beginning."""
        self.start({**self._settings, "run.max_steps": max_steps})

    def go_on(self, *, by_force: bool = False) -> None:
        """Start it again once it has ended, as it must by itself; by_force: what of it still runs is killed."""
        if by_force:
            self.kill_all()
        self.resume()

    def end_after(self, steps: int) -> int:
        """Stop it as a person does, give it an end `steps` steps later, and let it come there; the steps in all.

        Raises RunError if it ends otherwise than well.
        """
        self.stop()
        last = self.version + steps
        self.resume(f"--set=run.max_steps={last}")
        return self.end(last)

    def end(self, last: int) -> int:
        """Let it come to its last step, which is returned. Raises RunError if it ends otherwise than well."""
        self.ends_well(f"the end of the run after step {last}")
        return last

    def audit(self) -> str:
        """What `asyncrl buffer audit` has to say against it, "" if nothing."""
        command = [sys.executable, "-m", "asyncrl.cli.main", "buffer", "audit", str(self.folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
        problems = [line for line in done.stdout.splitlines() if line.startswith("PROBLEM")]
        if problems:
            return f"{len(problems)} problems, the first: {problems[0].removeprefix('PROBLEM ')}"
        return "" if done.returncode == 0 else (done.stdout + done.stderr)[-500:]

    def kill(self, point: str) -> None:
        """SIGKILL, at a point of `soak_child.POINTS` or of one of OUTSIDE; returns when it is done."""
        if point == "launcher":
            self.process.kill()
        elif point == "store":
            os.kill(json.loads((self.folder / "store.json").read_bytes())["pid"], signal.SIGKILL)
        else:
            struck = self._faults / f"{point}.struck"
            (self._faults / point).touch()
            self._until(struck.exists, STRIKE_S, f"a process that reaches {point}", running=True)
            struck.unlink()
