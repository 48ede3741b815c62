"""Real processes for the tests of every area: started, watched with a limit, and never left behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

ASYNCRL = ("-P", "-m", "asyncrl.cli.main")
"""-P: the console script does not have the working folder on its path either."""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start `python ARGUMENTS` in a session of its own, with both outputs piped or in one file; what is left of its
    tree after the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(
        *arguments: str, cwd: Path | None = None, output: IO[str] | None = None, **environment: str
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output or subprocess.PIPE,
            stderr=output or subprocess.PIPE,
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


@pytest.fixture
def begin(start: Start, tmp_path: Path) -> Start:
    """Start `asyncrl ARGUMENTS` in the test's folder."""

    def begin(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        return start(*ASYNCRL, *arguments, cwd=tmp_path, **environment)

    return begin


@pytest.fixture
def cli(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `asyncrl ARGUMENTS` to its end in the test's folder."""

    def run(*arguments: str, timeout: float = 100, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *ASYNCRL, *arguments],
            check=False,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, **environment},
        )

    return run


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real store for the tests of one file, which have runs of their own in it."""
    from asyncrl.buffers.server import EmbeddedServer

    server = EmbeddedServer(tmp_path_factory.mktemp("store"))
    asyncio.run(server.start())
    yield server.url
    asyncio.run(server.stop())


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
