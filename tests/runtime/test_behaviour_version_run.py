"""A run by `objective.proximal: behaviour-version`, in real processes: it learns, and says how the ratio splits."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT_S = 250.0
STEPS = 30
FLAGS = ("objective.proximal=behaviour-version", "weights.update=recompute", f"run.max_steps={STEPS}")


def test_a_run_that_asks_the_versions_that_sampled_learns_and_tells_mismatch_from_staleness(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    settings = [flag for setting in FLAGS for flag in ("--set", setting)]
    run = start("-m", "asyncrl.cli.main", "run", "--max-trajectory-age", "2", *settings, cwd=tmp_path)
    said, errors = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0, said + errors
    (folder,) = (tmp_path / "runs").iterdir()
    steps = [s for line in (folder / "metrics.jsonl").read_text().splitlines() if "step" in (s := json.loads(line))]
    assert len(steps) == STEPS
    assert max(step["age/max"] for step in steps) == 2

    summary = json.loads((folder / "summary.json").read_text())
    assert summary["success_after"] > summary["success_before"] + 0.3

    for step in steps:
        assert step["mismatch/max"] < 1e-4
        assert all(bucket["mismatch_max"] < 1e-4 for bucket in step["by_age"].values())
        assert all(math.isfinite(bucket["staleness_mean"]) for bucket in step["by_age"].values())
        assert step["proximal/behaviour_tokens"] == step["proximal/approximate_tokens"] == 0
    aged = [bucket for step in steps for age, bucket in step["by_age"].items() if age != "0"]
    assert max(abs(bucket["staleness_kl"]) for bucket in aged) > 1e-3
