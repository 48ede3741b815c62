"""A real `asyncrl run` in a folder, watched from outside by its files and processes: what a benchmark kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from asyncrl.benchmarks.runs import RunError
from asyncrl.runtime.tail import JsonLines, last_lines

ASYNCRL = "asyncrl.cli.main"

HANG_S = 120.0
"""Without a step, or the end that was due, for so long, a run counts as hung. What it may need: three processes that
import torch on two cores, and the 30 s after which a silent collector counts as lost."""

LOOK_S = 0.02


class Hung(RunError):
    """What was due did not come; says what."""


class Ended(RunError):
    """The run ended though nothing was killed that should end it; with its last words."""


class WatchedRun:
    """One run, in `run` of the new folder `folder`. As a context: whatever is left of its processes at the end is
    killed."""

    def __init__(self, folder: Path, *, module: str = ASYNCRL, environment: Mapping[str, str] | None = None) -> None:
        """module: what is started as `asyncrl`, with `environment` beside this process's."""
        self.folder = folder / "run"
        self.finished = 0  # steps seen, those that were made again included
        self.version = 0  # after the last of them
        folder.mkdir(parents=True)
        self._said = folder / "said.log"
        self._module = module
        self._environment = {**os.environ, **(environment or {})}
        self._metrics = JsonLines(self.folder / "metrics.jsonl")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill_all()

    def start(self, settings: Mapping[str, Any]) -> None:
        """Start the default recipe with `settings` (key -> value) from the beginning."""
        chosen = {**settings, "run.output_dir": self.folder}
        self._start("tiny-reverse", *(f"--set={key}={value}" for key, value in chosen.items()))

    def resume(self, *arguments: str) -> None:
        """Start it again once it has ended, as it must by itself."""
        self.ended("the end of the run, whose learner is dead")
        self._start("--resume", str(self.folder), *arguments)

    def steps(self, count: int) -> None:
        """Wait for `count` more steps. Raises Hung when the next one does not come, Ended if the run has ended."""
        for _ in range(count):
            self._look()
            before = self.finished
            self._until(lambda: self._look() > before, HANG_S, "the next step", running=True)  # noqa: B023  # called here

    def ended(self, what: str = "the end of the run", *, limit_s: float = HANG_S) -> int:
        """Wait for the end; its exit code. Raises Hung."""
        self._until(lambda: self.process.poll() is not None, limit_s, what)
        self._look()
        return int(self.process.returncode)

    def ends_well(self, what: str = "the end of the run", *, limit_s: float = HANG_S) -> None:
        """Wait for an end with code 0. Raises Hung, RunError."""
        if code := self.ended(what, limit_s=limit_s):
            raise RunError(f"{what} came with code {code}:\n{self._last_words()}")

    def children(self, role: str | None = None) -> list[psutil.Process]:
        """Its processes below the supervisor, or those that are `asyncrl ROLE`: learner, collector."""
        found = []
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):  # type: ignore[no-untyped-call]
                with suppress(psutil.NoSuchProcess):
                    if role is None or f"{self._module} {role}" in " ".join(child.cmdline()):
                        found.append(child)
        return found

    def kill_all(self) -> None:
        """SIGKILL for the whole tree, the supervisor first, so that it sees none of the others die."""
        if self._process is None:
            return
        tree = self.children()
        self._process.kill()
        for child in tree:
            with suppress(psutil.NoSuchProcess):
                child.kill()  # type: ignore[no-untyped-call]
        self._process.wait(HANG_S)

    def stop(self) -> None:
        """End it as a person does."""
        self.process.send_signal(signal.SIGTERM)
        self.ended("the end of the run after SIGTERM")

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The supervisor."""
        assert self._process is not None, "the run was not started"
        return self._process

    def _start(self, *arguments: str) -> None:
        with self._said.open("ab") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, "run", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env=self._environment,
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
