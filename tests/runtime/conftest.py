"""A run and its processes, seen from outside."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.processes import ASYNCRL, Start, children, within

START_S = 90.0
"""Making the built-in model, once, and importing torch three times on two busy cores."""


class Run:
    """A run in a folder of its own: its processes and what it wrote."""

    def __init__(
        self, start: Start, folder: Path, *arguments: str, program: Sequence[str] = ASYNCRL, **environment: str
    ) -> None:
        self.working = folder
        self.process = start(*program, "run", *arguments, cwd=folder, **environment)

    @property
    def folder(self) -> Path:
        """Its own, `out` or the one below `runs`."""
        return out if (out := self.working / "out").exists() else next((self.working / "runs").iterdir())

    def records(self) -> list[dict[str, Any]]:
        try:
            text = (self.folder / "metrics.jsonl").read_text()
        except (OSError, StopIteration):
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def steps(self) -> list[int]:
        return [record["step"] for record in self.records() if "step" in record and "event" not in record]

    def saved(self) -> list[int]:
        """The versions of its checkpoints, as it told them."""
        return [record["version"] for record in self.records() if record.get("event") == "checkpoint"]

    def child(self, role: str) -> psutil.Process:
        """The running learner or collector, by its command line."""
        for process in psutil.Process(self.process.pid).children():
            if role in process.cmdline():
                return process
        raise AssertionError(f"no {role} among the children of the run")

    def tree(self) -> list[int]:
        return [process.pid for process in children(self.process.pid)]


@pytest.fixture
def begin(start: Start, tmp_path: Path) -> Callable[..., Run]:
    def begin(*arguments: str, steps: int = 2, max_steps: int = 5000, **options: Any) -> Run:
        run = Run(start, tmp_path, "--set", f"run.max_steps={max_steps}", *arguments, **options)
        assert within(START_S, lambda: len(run.steps()) >= steps or run.process.poll() is not None)
        assert run.process.poll() is None, run.process.communicate()
        return run

    return begin
