"""Real second processes for the tests of weights; each is killed at the end of its test at the latest."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start `python -c script arguments...` with pipes for stdin and stdout. `before`: what the command begins with."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str, *arguments: str, before: Sequence[str] = ()) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*before, sys.executable, "-c", script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(timeout=20)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
