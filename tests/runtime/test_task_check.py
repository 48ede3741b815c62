"""A task of one's own is built in a process that may do anything, and of which nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from asyncrl.config.convert import convert
from asyncrl.runtime import task_check
from asyncrl.tasks.base import TaskError

LIMIT_S = 60.0

LEAVES_A_PROCESS = """
import subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("left.pid", "w").write(str(left.pid))
"""

TASK = """
from asyncrl.tasks.base import Row

class Mine:
    def rows(self, split):
        return [Row(split, "2+2")]

    def score(self, row, answer):
        return 1.0
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Write mine.py into the working folder."""
    monkeypatch.chdir(tmp_path)

    def write(source: str) -> Path:
        (tmp_path / "mine.py").write_text(source)
        return tmp_path

    return write


async def check() -> None:
    async with asyncio.timeout(LIMIT_S):
        await task_check.check_apart(convert({"task": {"type": "mine:Mine"}}))


@pytest.mark.faults
@pytest.mark.asyncio
@pytest.mark.parametrize("source", [LEAVES_A_PROCESS + TASK, LEAVES_A_PROCESS + "raise OSError('no such device')"])
async def test_what_a_module_starts_is_neither_waited_for_nor_left_behind(
    module: Callable[[str], Path], source: str, is_alive: Callable[[int], bool], eventually: Callable[..., bool]
) -> None:
    """It has the check's standard error open, for ten minutes."""
    folder = module(source)
    if source.endswith(TASK):
        await check()
    else:
        with pytest.raises(TaskError, match="no such device"):
            await check()
    left = int((folder / "left.pid").read_text())
    assert eventually(LIMIT_S, lambda: not is_alive(left))


@pytest.mark.asyncio
async def test_a_module_that_ends_its_process_is_told_by_its_last_words(module: Callable[[str], Path]) -> None:
    module("import os, sys\nsys.stderr.write('no licence found\\n')\nsys.stderr.flush()\nos._exit(0)\n")
    with pytest.raises(TaskError, match=r"mine:Mine: building it ended its process with code 0: no licence found"):
        await check()


@pytest.mark.faults
@pytest.mark.asyncio
async def test_a_module_that_hangs_is_ended_with_what_it_started(
    module: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., bool]
) -> None:
    module("import time\ntime.sleep(600)\n")
    before = set(psutil.Process().children(recursive=True))  # stores of other tests
    monkeypatch.setattr(task_check, "LIMIT_S", 1.0)
    with pytest.raises(TaskError, match="it was not built within 1 s"):
        await check()
    assert eventually(LIMIT_S, lambda: set(psutil.Process().children(recursive=True)) <= before)
