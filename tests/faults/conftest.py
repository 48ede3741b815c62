"""Runs in a real store, and processes of the product."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffers.limits import Limits
from asyncrl.buffers.remote import RedisBuffer
from asyncrl.buffers.store import Store
from tests.buffer.driver import Clock
from tests.processes import ASYNCRL, Start

_names = (f"run{n}" for n in itertools.count())


@pytest.fixture
def new_run() -> Any:
    """`await new_run(store, limits)`: a run of its own, on a clock that stands still."""

    async def new_run(store: Store, limits: Limits) -> RedisBuffer:
        buffer = await store.create_run(next(_names), recipe={}, recipe_hash="h", limits=limits)
        buffer.clock = Clock()
        return buffer

    return new_run


@pytest.fixture
def spawn(start: Start, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start `asyncrl ARGUMENTS`, or another `program`, in the test's folder; what it says goes to <its name>.log."""

    def spawn(
        name: str, *arguments: str, program: tuple[str, ...] = ASYNCRL, **environment: str
    ) -> subprocess.Popen[str]:
        with (tmp_path / f"{name}.log").open("a") as log:
            return start(*program, *arguments, cwd=tmp_path, output=log, **environment)

    return spawn
