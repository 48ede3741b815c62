"""`asyncrl run` at an absurd rate: it says what it does about it, and ends when there is nothing left to learn from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT_S = 250.0
FLAGS = (
    "learner.learning_rate=0.05",
    "learner.rate_by_ess=true",
    "learner.min_ess=0.3",
    "learner.max_low_ess_steps=2",
    "eval.at_start=false",
)


def test_a_run_whose_data_collapse_slows_down_and_then_ends_with_numbers_and_advice(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    settings = [flag for setting in FLAGS for flag in ("--set", setting)]
    run = start("-m", "asyncrl.cli.main", "run", "--max-trajectory-age", "2", *settings, cwd=tmp_path)
    said, errors = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 1, said + errors
    assert "(ess/sequence) was below 0.3 in 2 steps in a row" in errors
    assert "Lower learner.learning_rate or buffer.max_trajectory_age" in errors
    assert "Traceback" not in errors
    assert "learning rate x 0." in said, "the console tells of a change once it is made"

    (folder,) = (tmp_path / "runs").iterdir()
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "step" in record]
    assert len(steps) < 60
    assert all(step["ess/sequence"] < 0.3 for step in steps[-2:])
    changes = [record for record in records if record.get("event") == "learning_rate"]
    assert changes[0]["scale_before"] == 1.0
    assert changes[0]["scale"] < 1.0
