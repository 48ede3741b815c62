"""The part `code` in verifier processes: limits of programs are no limits of verifiers, and whoever is killed, nothing
that a model wrote goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.rewards.pool import VerifierError, VerifierPool
from asyncrl.rewards.sandbox_folder import remove_abandoned
from asyncrl.rewards.scoring import Scoring

pytestmark = pytest.mark.faults

RIGHT = "def double(n): return 2 * n"
LOOP = "while True: pass"
ROW = {"id": "1", "prompt": "p", "answer": None, "info": {"tests": ["assert double(21) == 42"]}}
TASK = {
    "type": "single-turn",
    "data": {"train": "rows.jsonl", "answer": None},
    "rewards": [{"type": "code", "test_timeout_s": 1.0, "total_timeout_s": 2.0}],
}
PARENT = """
import asyncio, json, sys
from tests.rewards.test_code_processes import LOOP, ROW, TASK, answer, scoring

async def main():
    TASK["rewards"][0].update(test_timeout_s=600.0, total_timeout_s=600.0)
    async with scoring(timeout_s=1000.0) as score:
        await score.score(ROW, answer("open('begun', 'w').close()\\n" + LOOP))

asyncio.run(main())
"""

Eventually = Callable[[float, Callable[[], object]], bool]


def answer(code: str) -> dict[str, Any]:
    return {"text": f"```python\n{code}\n```", "token_ids": [1], "finish_reason": "stop", "messages": []}


@asynccontextmanager
async def scoring(*, workers: int = 1, timeout_s: float = 30.0) -> AsyncIterator[Scoring]:
    arguments = {"task": TASK, "seed": 0, "max_tokens": 100}
    made = Scoring(VerifierPool("asyncrl.tasks.scorer:scorer", arguments, workers=workers), timeout_s=timeout_s)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


def processes(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


@pytest.mark.asyncio
async def test_programs_without_end_are_wrong_at_their_limit_and_verifiers_go_on(eventually: Eventually) -> None:
    before = {process.pid for process in processes(os.getpid())}
    async with scoring(workers=2) as score:
        found = await asyncio.gather(*(score.score(ROW, answer(LOOP)) for _ in range(8)))
        assert [(one.reward, one.failure, one.wrong) for one in found] == [(0.0, "", "timeout")] * 8
        right = await score.score(ROW, answer(RIGHT))
        assert (right.reward, right.failure, right.wrong) == (1.0, "", "")
    assert eventually(10, lambda: {process.pid for process in processes(os.getpid())} <= before)


@pytest.mark.asyncio
async def test_a_machine_that_cannot_shut_programs_in_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import platform\nplatform.machine = lambda: 'riscv64'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(VerifierError, match="Unprotected: a model's code is only run shut in, on Linux"):
        async with scoring():
            pass


@pytest.mark.parametrize("killed", ["collector", "verifier"])
def test_a_program_ends_with_the_process_that_it_runs_for(killed: str, tmp_path: Path, eventually: Eventually) -> None:
    """With `kill -9`, which nobody can prepare for; its folder goes too."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    collector = subprocess.Popen([sys.executable, "-P", "-c", PARENT], env=environment, start_new_session=True)
    try:
        assert eventually(60, lambda: list(tmp_path.glob("asyncrl-sandbox-*/*/begun")))
        tree = processes(collector.pid)
        verifier = next(process for process in tree if "asyncrl.rewards.worker" in process.cmdline())
        assert len(tree) == 4  # verifier, zygote, program, tests
        if killed == "collector":
            os.kill(collector.pid, signal.SIGKILL)
        else:
            os.killpg(verifier.pid, signal.SIGKILL)
        gone, alive = psutil.wait_procs([process for process in tree if process.pid != verifier.pid], timeout=20)
        assert len(gone) + sum(process.status() == psutil.STATUS_ZOMBIE for process in alive) == 3
        assert eventually(10, lambda: not list(tmp_path.glob("asyncrl-sandbox-*/*/begun")))
    finally:
        left = processes(collector.pid) if collector.poll() is None else []
        for process in left:
            process.kill()
        collector.kill()
        collector.wait(10)


def test_a_program_ends_with_the_process_that_watches_it(tmp_path: Path, eventually: Eventually) -> None:
    """Killed too, by a person or for want of memory: the kernel sees to the program, the next sandbox to the folder."""
    source = (
        "import sys, threading\n"
        "from asyncrl.rewards.sandbox import Sandbox\n"
        "sandbox = Sandbox(memory_bytes=1 << 27)\n"
        "print(sandbox.pid, flush=True)\n"
        "sandbox.run('while True: pass', '', limit_s=600)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    verifier = subprocess.Popen(
        [sys.executable, "-c", source], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert verifier.stdout is not None
        zygote = psutil.Process(int(verifier.stdout.readline()))
        assert eventually(60, zygote.children)
        (program,) = zygote.children()
        zygote.kill()
        assert eventually(10, lambda: not program.is_running() or program.status() == psutil.STATUS_ZOMBIE)
        verifier.wait(60)
    finally:
        verifier.kill()
        verifier.communicate(timeout=10)
    (left,) = tmp_path.glob("asyncrl-sandbox-*")
    os.utime(left, (0, 0))
    remove_abandoned(tmp_path)
    assert not left.exists()


def test_a_plain_program_outlives_who_started_it() -> None:
    """What the tests above would find without the sandbox."""
    program = "import time; time.sleep(600)"
    source = (
        "import os, subprocess, sys\n"
        f"started = subprocess.Popen([sys.executable, '-c', {program!r}], stdout=subprocess.DEVNULL)\n"
        "print(started.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    left = psutil.Process(int(ended.stdout))
    assert left.status() != psutil.STATUS_ZOMBIE
    left.kill()
