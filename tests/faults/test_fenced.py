"""A learner that is stopped between its optimizer step and the commit, and another that takes over meanwhile."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from asyncrl.buffers.archive import Archive
from asyncrl.buffers.audit import audit
from asyncrl.buffers.base import Fenced
from asyncrl.buffers.store import script_text
from asyncrl.schema import decode
from asyncrl.staleness import Weights
from asyncrl.telemetry.metrics import read_metrics
from tests.faults.runs import begin, collecting, leased, recipe_of, step, to_the_end
from tests.processes import within

pytestmark = pytest.mark.faults

STEPS = 8
FENCE = "if a.lineage == num('lineage') then return nil end"


async def taken_over(url: str, name: str, folder: Path, script: str = "") -> list[str]:
    """A learner trains step 4 and stands still; another resumes from version 3 and leases its own step 4; then the
    first one comes back and commits. Returns what is wrong at the end."""
    archive = Archive(folder / "archive")
    async with collecting(url, recipe_of(name, steps=STEPS), script=script) as buffer:
        weights = await begin(buffer)
        while weights.version < 4:
            weights = await step(buffer, archive, weights)
            if weights.version == 3:
                saved = weights
                await buffer.checkpointed(*saved)
        trained = await leased(buffer, weights)
        archive.write(*weights, [decode(payload) for payload in await buffer.payloads(trained)])

        again = await step(buffer, archive, await begin(buffer, parent=saved), fork=saved)
        await leased(buffer, again)
        try:
            await buffer.commit(*weights)
            again = Weights(again.lineage, again.version + 1)
        except Fenced:
            pass
        await to_the_end(buffer, archive, again, fork=saved)
        report = await audit(buffer, archive)
    return report.problems


@pytest.mark.asyncio
async def test_a_commit_of_a_learner_that_was_replaced_is_refused(server_url: str, tmp_path: Path) -> None:
    assert await taken_over(server_url, "fenced", tmp_path) == []


@pytest.mark.asyncio
async def test_without_the_fence_it_commits_its_successors_batch(server_url: str, tmp_path: Path) -> None:
    assert FENCE in script_text()
    script = script_text().replace(FENCE, "if true then return nil end")
    problems = await taken_over(server_url, "unfenced", tmp_path, script)
    assert any("lineage=1, version=4" in problem or "lineage 2 step 4" in problem for problem in problems), problems


STOPS_ITSELF = """
import os, signal
from asyncrl.buffers.remote import RedisBuffer
from asyncrl.cli.main import main

commit = RedisBuffer.commit

async def stop_and_commit(self, lineage, step, **how):
    if step == 4:
        os.kill(os.getpid(), signal.SIGSTOP)
    return await commit(self, lineage, step, **how)

RedisBuffer.commit = stop_and_commit
main()
"""

LEARN_S = 150.0  # the built-in model is made once, torch is imported three times on two busy cores


def steps_of(folder: Path) -> list[int]:
    return [record["step"] for record in read_metrics(folder / "metrics.jsonl") if "event" not in record]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_stopped_learner_comes_back_to_a_run_that_another_has_resumed(
    server_url: str, tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    settings = (
        "run.name=taken-over",
        f"run.max_steps={STEPS}",
        "learner.checkpoint.every_steps=3",
        "eval.at_end=false",
    )
    setting = [text for key in (*settings, "eval.at_start=false") for text in ("--set", key)]
    first = spawn("first", "learner", "--buffer", server_url, *setting, program=("-c", STOPS_ITSELF))
    collector = spawn("collector", "collector", "--buffer", server_url, "--run", "taken-over", "--wait", "3m")
    assert within(LEARN_S, lambda: psutil.Process(first.pid).status() == psutil.STATUS_STOPPED)
    folder = next((tmp_path / "runs").iterdir())
    assert steps_of(folder) == [1, 2, 3, 4]
    assert (folder / "archive" / "step-0001-000004.parquet").is_file(), "step 4 is trained and archived"

    # On another host, from a copy: on this one the folder is locked as long as the stopped learner lives.
    shutil.copytree(folder, tmp_path / "elsewhere")
    second = spawn("second", "learner", "--resume", str(tmp_path / "elsewhere"), "--buffer", server_url)
    assert within(LEARN_S, lambda: steps_of(tmp_path / "elsewhere")[-1:] > [4] or second.poll() is not None)
    first.send_signal(signal.SIGCONT)
    assert first.wait(timeout=60) == 1
    assert "was replaced by lineage 2" in (tmp_path / "first.log").read_text()
    assert steps_of(folder) == [1, 2, 3, 4], "it wrote nothing more"
    assert second.wait(timeout=LEARN_S) == 0, (tmp_path / "second.log").read_text()
    assert collector.wait(timeout=60) == 0

    audited = spawn("audit", "buffer", "audit", str(tmp_path / "elsewhere"), "--buffer", server_url)
    assert audited.wait(timeout=60) == 0, (tmp_path / "audit.log").read_text()
    assert (tmp_path / "audit.log").read_text().endswith("clean\n")
