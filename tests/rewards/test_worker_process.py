"""What only a whole process tree shows: imports, `kill -9` of the parent, and why a thread would not do."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

STUCK_SCORER = """
import os

class Scorer:
    def part_weights(self): return {}
    def score(self, row, answer):
        with open(PIPE, "w") as pipe:
            pipe.write(str(os.getpid()))
        return 5**5**5**5
"""

PARENT = """
import asyncio, sys
from asyncrl.rewards.pool import VerifierPool

async def main():
    pool = VerifierPool("stuck_scorer:Scorer", {}, workers=1)
    await pool.start()
    await pool.verdict({}, {}, timeout_s=600)

asyncio.run(main())
"""

NO_DEATH_SIGNAL = """
import ctypes, types
ctypes.CDLL = lambda *_, **__: types.SimpleNamespace(prctl=lambda *_: 0)
"""

THREAD = """
import threading
print("started", flush=True)
scoring = threading.Thread(target=lambda: 5**5**5**5, daemon=True)
scoring.start()
scoring.join(1.0)  # the limit
print("limit kept", flush=True)
"""


@pytest.fixture
def stuck_tree(tmp_path: Path) -> Iterator[Callable[[str], tuple[subprocess.Popen[bytes], int]]]:
    """Starts a parent whose worker is stuck in a computation; gives the parent and the worker's id."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "stuck_scorer.py").write_text(f"PIPE = {str(pipe)!r}\n{STUCK_SCORER}")
    parents: list[subprocess.Popen[bytes]] = []
    workers: list[int] = []

    def start(sitecustomize: str) -> tuple[subprocess.Popen[bytes], int]:
        (tmp_path / "sitecustomize.py").write_text(sitecustomize)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        parents.append(subprocess.Popen([sys.executable, "-c", PARENT], env=environment))
        assert select.select([reader], [], [], 60)[0]
        workers.append(int(os.read(reader, 20)))
        os.close(reader)
        return parents[-1], workers[-1]

    yield start
    for parent in parents:
        parent.kill()
        parent.wait(10)
    for worker in workers:
        if Path(f"/proc/{worker}/cmdline").exists() and b"asyncrl" in Path(f"/proc/{worker}/cmdline").read_bytes():
            os.kill(worker, signal.SIGKILL)


@pytest.mark.faults
def test_a_stuck_worker_dies_with_its_parent_even_by_kill_9(
    stuck_tree: Callable[[str], tuple[subprocess.Popen[bytes], int]],
    process_ends_within: Callable[[int, float], bool],
) -> None:
    parent, worker = stuck_tree("")
    assert not process_ends_within(worker, 0.5)
    parent.kill()
    assert process_ends_within(worker, 10)


@pytest.mark.faults
def test_without_the_death_signal_the_end_of_input_alone_leaves_an_orphan(
    stuck_tree: Callable[[str], tuple[subprocess.Popen[bytes], int]],
    process_ends_within: Callable[[int, float], bool],
) -> None:
    """Negative control of the test above."""
    parent, worker = stuck_tree(NO_DEATH_SIGNAL)
    parent.kill()
    assert not process_ends_within(worker, 3)


@pytest.mark.faults
def test_a_thread_with_a_limit_does_not_stop_a_stuck_score() -> None:
    """Negative control of the time limit: even the thread that waits never gets the interpreter back."""
    with subprocess.Popen([sys.executable, "-c", THREAD], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"started\n"
            assert not select.select([process.stdout], [], [], 5)[0]
        finally:
            process.kill()


def test_an_idle_worker_ends_when_its_input_ends(tmp_path: Path) -> None:
    start = b"\x83\xa7factory\xa6no:one\xa9arguments\x80\xa4path\x90"
    command = [sys.executable, "-P", "-m", "asyncrl.rewards.worker", str(os.getpid())]
    for fed in (b"", len(start).to_bytes(4, "big") + start):
        done = subprocess.run(command, input=fed, capture_output=True, timeout=30, check=False)
        assert (b"ModuleNotFoundError" in done.stdout) == bool(fed)


def test_a_worker_whose_parent_was_gone_before_it_started_does_not_stay() -> None:
    command = [sys.executable, "-P", "-m", "asyncrl.rewards.worker", "1"]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, timeout=30, check=False).returncode == 1


def test_a_worker_loads_neither_torch_nor_anything_else_that_is_heavy() -> None:
    """Its start is what a killed score costs."""
    code = "import asyncrl.rewards.worker, asyncrl.tasks.scorer, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=30, check=True)
    heavy = {"torch", "transformers", "numpy", "pyarrow", "asyncio", "redis", "asyncrl.rewards.pool"}
    assert not heavy & set(loaded.stdout.split())
