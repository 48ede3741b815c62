"""Real processes for the tests: started, watched with a limit, and never left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

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
