"""The run that `bench soak` kills: `asyncrl run` in a folder, watched from outside by its files and processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from asyncrl.benchmarks.runs import RunError
from asyncrl.benchmarks.soak_child import FOLDER, MODULE
from asyncrl.runtime.tail import JsonLines, last_lines

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
    "learner.ranks": 2,
    "learner.learning_rate": 1e-5,
    "buffer.max_trajectory_age": 1,
    "eval.at_start": "false",
    "eval.at_end": "false",
}
"""Small, since starting takes the time: 200 kills are 200 starts. The answers are of a simulated engine; they teach
nothing, and fit into the model's length."""

ENDLESS = 1_000_000  # steps of a run that is to be killed; `finish` gives it an end

HANG_S = 120.0
"""Without a step, or the end that was due, for so long, a run counts as hung. What it may need: three processes that
import torch on two cores, and the 30 s after which a silent collector counts as lost."""

STRIKE_S = 60.0  # from arming a point until somebody reaches it: each is passed in every step or two
LOOK_S = 0.02


class Hung(RunError):
    """What was due did not come; says what."""


class Ended(RunError):
    """The run ended though nothing was killed that should end it; with its last words."""


class SoakRun:
    """One run in the new folder `folder`. As a context: whatever is left of its processes at the end is killed."""

    def __init__(self, folder: Path, *, sabotage: str, every_steps: int) -> None:
        self.folder = folder / "run"
        self.finished = 0  # steps seen, those that were made again included
        self.version = 0  # after the last of them
        self._faults = folder / "faults"
        self._faults.mkdir(parents=True)
        if sabotage:
            (self._faults / sabotage).touch()
        self._said = folder / "said.log"
        self._settings = {**SETTINGS, "learner.checkpoint.every_steps": every_steps}
        self._metrics = JsonLines(self.folder / "metrics.jsonl")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill_all()

    def start(self) -> None:
        """Start it from the beginning."""
        settings = {**self._settings, "run.output_dir": self.folder, "run.max_steps": ENDLESS}
        self._start("tiny-reverse", *(f"--set={key}={value}" for key, value in settings.items()))

    def resume(self, *, by_force: bool = False) -> None:
        """Start it again once it has ended, as it must by itself; by_force: what of it still runs is killed."""
        if by_force:
            self._kill_all()
        self._until(lambda: self.process.poll() is not None, HANG_S, "the end of the run, whose learner is dead")
        self._start("--resume", str(self.folder))

    def finish(self, steps: int) -> int:
        """Stop it as a person does, give it an end `steps` steps later, and let it come there; the steps in all.

        Raises RunError if it ends otherwise than well.
        """
        self.process.send_signal(signal.SIGTERM)
        self._until(lambda: self.process.poll() is not None, HANG_S, "the end of the run after SIGTERM")
        self._look()
        last = self.version + steps
        self._start("--resume", str(self.folder), f"--set=run.max_steps={last}")
        self._until(lambda: self.process.poll() is not None, HANG_S, f"the end of the run after step {last}")
        if self.process.returncode != 0:
            raise RunError(f"the run's last part ended with code {self.process.returncode}:\n{self._last_words()}")
        return last

    def audit(self) -> str:
        """What `asyncrl buffer audit` has to say against it, "" if nothing."""
        command = [sys.executable, "-m", "asyncrl.cli.main", "buffer", "audit", str(self.folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
        problems = [line for line in done.stdout.splitlines() if line.startswith("PROBLEM")]
        if problems:
            return f"{len(problems)} problems, the first: {problems[0].removeprefix('PROBLEM ')}"
        return "" if done.returncode == 0 else (done.stdout + done.stderr)[-500:]

    def steps(self, count: int) -> None:
        """Wait for `count` more steps. Raises Hung when the next one does not come, Ended if the run has ended."""
        for _ in range(count):
            self._look()
            before = self.finished
            self._until(lambda: self._look() > before, HANG_S, "the next step", running=True)  # noqa: B023  # called here

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

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the run was not started"
        return self._process

    def _start(self, *arguments: str) -> None:
        with self._said.open("ab") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, "run", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env={**os.environ, FOLDER: str(self._faults)},
                start_new_session=True,
            )

    def _look(self) -> int:
        """Read what is new in metrics.jsonl; the steps seen so far."""
        for record in self._metrics.read():
            if "event" not in record:
                self.finished, self.version = self.finished + 1, int(record["step"])
        return self.finished

    def _until(self, condition: Callable[[], bool], limit_s: float, what: str, *, running: bool = False) -> None:
        """Look until the condition holds. running: the run must not end meanwhile."""
        deadline = time.monotonic() + limit_s
        while not condition():
            if running and self.process.poll() is not None:
                raise Ended(f"the run ended with code {self.process.returncode}:\n{self._last_words()}")
            if time.monotonic() > deadline:
                raise Hung(f"{what} did not come within {limit_s:.0f} s:\n{self._last_words()}")
            time.sleep(LOOK_S)

    def _last_words(self) -> str:
        return "\n".join(last_lines(self._said, 8))

    def _kill_all(self) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            for child in psutil.Process(self._process.pid).children(recursive=True):  # type: ignore[no-untyped-call]
                child.kill()
        self._process.kill()
        self._process.wait(HANG_S)
