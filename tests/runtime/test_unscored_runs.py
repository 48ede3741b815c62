"""Runs whose verifiers fail while they train: they end, and say with which answers; with `null` they go on."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ASYNCRL
from tests.rewards.judge_server import Scripted, failure, serving

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(300)]

LIMIT_S = 200.0

TASK = """
from asyncrl.tasks.base import Row

class Moody:
    def rows(self, split):
        return [Row(id=f"{split}-{n}", prompt=f"reverse {n}", answer=str(n)[::-1]) for n in range(100, 200)]

    def score(self, row, answer):
        if hash_of(row.id, answer.text) < 7:
            raise LookupError("the mood is not right")
        return float(answer.text == row.answer)

def hash_of(*texts):
    return sum(map(ord, "".join(texts))) % 10
"""

SHORT = (
    "collector.group_size=4",
    "learner.groups_per_step=4",
    "eval={at_start: false, at_end: false}",
    "telemetry.print_completions=null",
)


def arguments(*changes: str) -> list[str]:
    return [*ASYNCRL, "run", *(f"--set={change}" for change in (*SHORT, *changes))]


def finished(run: subprocess.Popen[str]) -> tuple[int, str, str]:
    said, errors = run.communicate(timeout=LIMIT_S)
    return run.returncode, said, errors


def test_a_verifier_that_fails_for_most_answers_ends_the_run_with_examples(
    start: Callable[..., Any], cli: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "moody.py").write_text(TASK)
    changes = ("task={type: 'moody:Moody'}", "run.max_steps=200")
    code, said, errors = finished(start(*arguments(*changes), cwd=tmp_path))
    assert code == 1, said + errors
    assert "collector collector-0: " in errors
    assert " answers could not be scored, more than collector.max_unscored 0.5: verifier_raised " in errors
    assert errors.count("  row train-") == 3
    assert errors.count("verifier_raised: LookupError: the mood is not right") == 3
    assert "again in" not in said, "a collector that found this out is not started again"
    status = cli("status")
    assert "it failed: collector collector-0: " in status.stdout
    assert "  row train-" in status.stdout


def test_with_null_the_same_run_goes_on(start: Callable[..., Any], tmp_path: Path) -> None:
    """The control."""
    (tmp_path / "moody.py").write_text(TASK)
    changes = ("task={type: 'moody:Moody'}", "run.max_steps=12", "collector.max_unscored=null")
    code, said, errors = finished(start(*arguments(*changes), cwd=tmp_path))
    assert code == 0, said + errors


@pytest.mark.asyncio
async def test_a_judge_that_goes_down_ends_the_run_with_its_own_words(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    def says(server: Scripted, asked: dict[str, Any]) -> Any:
        # Good for some steps, then for nothing.
        return "7" if len(server.questions) <= 300 else failure(503, "the judge has gone home")

    async with serving(says) as server:
        judge = f"{{type: judge, url: '{server.url}', model: m, retries: 0, role: constraint}}"
        run = start(*arguments(f"task={{type: reverse, rewards: [{judge}]}}", "run.max_steps=500"), cwd=tmp_path)
        code, said, errors = await asyncio.to_thread(finished, run)
    assert code == 1, said + errors
    assert "more than collector.max_unscored 0.5: judge_unavailable " in errors
    assert "503" in errors
    assert "the judge has gone home" in errors
    (folder,) = (tmp_path / "runs").iterdir()
    assert any((folder / "checkpoints").iterdir()), "what was trained before is saved"


def test_a_judge_that_is_not_there_is_a_fault_of_the_recipe(start: Callable[..., Any], tmp_path: Path) -> None:
    judge = "{type: judge, url: 'http://127.0.0.1:9/v1', model: m, retries: 0}"
    code, said, errors = finished(start(*arguments(f"task={{type: reverse, rewards: [{judge}]}}"), cwd=tmp_path))
    assert code == 2, said + errors
    first, fix = errors.splitlines()
    assert first.startswith("Error: the judge 'judge', m at http://127.0.0.1:9/v1, cannot be asked: ")
    assert fix == "Start it, or mend url, model and api_key_env of this part of task.rewards"
