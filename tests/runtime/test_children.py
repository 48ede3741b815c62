import asyncio
import sys

import pytest

from asyncrl.runtime import children
from asyncrl.runtime.children import Child


@pytest.fixture
def child(tmp_path, monkeypatch):
    """A child that runs Python code instead of a command of ours."""
    monkeypatch.setattr(children.tether, "command", lambda argv: [sys.executable, *argv[4:]])
    return lambda code: Child("worker", ["-c", code], log=tmp_path / "worker.log")


@pytest.mark.asyncio
async def test_a_child_gets_its_input_and_environment_and_its_output_is_its_log(child):
    worker = child("import os, sys; print(sys.stdin.read(), os.environ['MORE']); sys.exit(4)")
    await worker.start({"MORE": "value"}, stdin=b"input")
    assert await worker.ended(20)
    assert worker.exited.result() == 4
    assert worker.log.read_text() == "input value\n"


@pytest.mark.asyncio
async def test_what_a_child_said_last_is_its_complaint_and_without_one_its_log_speaks(child):
    worker = child("print('noise'); print('Error: no rows\\nGive some.')")
    await worker.start({})
    assert await worker.ended(20)
    assert worker.complaint() == "no rows\nGive some."
    assert worker.last_words() == f"no rows\nGive some.\nIts log: {worker.log}"

    silent = Child("silent", ["-c", "import os; os.abort()"], log=worker.log.with_name("silent.log"))
    await silent.start({})
    assert await silent.ended(20)
    assert silent.complaint() == ""
    assert silent.last_words().startswith(f"silent was killed by SIGABRT; the last lines of {silent.log}:")


@pytest.mark.asyncio
async def test_killing_a_child_ends_its_own_children_too(child, eventually, is_alive):
    worker = child("import subprocess; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()")
    await worker.start({})
    assert await asyncio.to_thread(eventually, 20, lambda: worker.log.read_text().endswith("\n"))
    grandchild = int(worker.log.read_text())
    assert not await worker.ended(0)
    await worker.kill()
    assert await asyncio.to_thread(eventually, 10, lambda: not is_alive(grandchild))
    await worker.kill()


@pytest.mark.asyncio
async def test_a_child_that_was_never_started_can_be_told_to_end(child):
    worker = child("")
    worker.terminate()
    await worker.kill()
