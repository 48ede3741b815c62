"""Real processes for the tests: started, watched with a limit, and never left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start `python ...` in a session of its own with both outputs piped; what is left of its tree is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        for child in children(process.pid):
            child.kill()
        process.kill()
        process.communicate(timeout=20)


def children(pid: int) -> list[psutil.Process]:
    """Every descendant of a process; [] if it is gone."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def alive(pid: int) -> bool:
    """Whether the process still runs. One that is dead but not reaped (an orphan in a container) does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def within(seconds: float, condition: Callable[[], object]) -> bool:
    """Whether the condition became true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


@pytest.fixture
def is_alive() -> Callable[[int], bool]:
    return alive


@pytest.fixture
def eventually() -> Callable[[float, Callable[[], object]], bool]:
    return within


@pytest.fixture
def descendants() -> Callable[[int], list[psutil.Process]]:
    return children


START_S = 90.0
"""Making the built-in model, once, and importing torch three times on two busy cores."""


class Run:
    """A run in a folder of its own, seen from outside: its processes and what it wrote."""

    def __init__(self, start: Start, folder: Path, *arguments: str, **environment: str) -> None:
        self.working = folder
        self.process = start("-m", "asyncrl.cli.main", "run", *arguments, cwd=folder, **environment)

    @property
    def folder(self) -> Path:
        return next((self.working / "runs").iterdir())

    def records(self) -> list[dict[str, Any]]:
        try:
            text = (self.folder / "metrics.jsonl").read_text()
        except (OSError, StopIteration):
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def steps(self) -> list[int]:
        return [record["step"] for record in self.records() if "step" in record and "event" not in record]

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
    def begin(*arguments: str, steps: int = 2, max_steps: int = 500, **environment: str) -> Run:
        run = Run(start, tmp_path, "--set", f"run.max_steps={max_steps}", *arguments, **environment)
        assert within(START_S, lambda: len(run.steps()) >= steps or run.process.poll() is not None)
        assert run.process.poll() is None, run.process.communicate()
        return run

    return begin
