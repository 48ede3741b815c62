"""A real store, runs in it, and processes of the product."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.buffers.base import Limits
from asyncrl.buffers.remote import RedisBuffer
from asyncrl.buffers.server import EmbeddedServer
from asyncrl.buffers.store import Store
from tests.buffer.driver import Clock

_names = (f"run{n}" for n in itertools.count())


@pytest.fixture(scope="session")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedServer(tmp_path_factory.mktemp("store"))
    asyncio.run(server.start())
    yield server.url
    asyncio.run(server.stop())


@pytest.fixture
def new_run() -> Any:
    """`await new_run(store, limits)`: a run of its own, on a clock that stands still."""

    async def new_run(store: Store, limits: Limits) -> RedisBuffer:
        buffer = await store.create_run(next(_names), recipe={}, recipe_hash="h", limits=limits)
        buffer.clock = Clock()
        return buffer

    return new_run


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `python ARGUMENTS` in the test's folder, by default `-m asyncrl.cli.main ...`; what it says goes to
    <its name>.log. What is left of it after the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def spawn(
        name: str, *arguments: str, program: tuple[str, ...] = ("-m", "asyncrl.cli.main"), **environment: str
    ) -> subprocess.Popen[str]:
        with (tmp_path / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, *program, *arguments],
                cwd=tmp_path,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        started.append(process)
        return process

    yield spawn
    for process in started:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
        process.wait(timeout=20)
