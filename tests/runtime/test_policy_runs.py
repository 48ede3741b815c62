"""The over-age policies, several uses and filters in real processes on the embedded store, audited from outside."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

LIMIT_S = 150.0
STEPS = 8
RECIPE = f"""
run: {{name: policy, max_steps: {STEPS}}}
buffer: {{dynamic_sampling: true}}
collector:
  engine: {{type: simulated, slots: 48, token_s: 0.02, mean_tokens: 12, cv: 1.5}}
  group_size: 4
learner: {{groups_per_step: 4, checkpoint: {{every_steps: 3}}}}
eval: {{at_start: false, at_end: false}}
"""

SAME = """
from asyncrl.tasks.base import Row
class Same:
    def rows(self, split): return [Row(f"{split}-{n}", f"reverse {n}") for n in range(100, 400)]
    def score(self, row, answer): return 0.0
"""

Start = Callable[..., Any]


@pytest.mark.parametrize(
    "settings",
    [("over_age=mask",), ("over_age=requeue",), ("max_uses=2", "min_fresh=0.5", "max_trajectory_age=2")],
    ids=" ".join,
)
def test_a_run_under_each_policy_ends_with_a_clean_audit_and_says_its_price(
    start: Start, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    flags = [flag for setting in settings for flag in ("--set", f"buffer.{setting}")]
    run = start("-m", "asyncrl.cli.main", "run", "recipe.yaml", *flags, cwd=tmp_path)
    said, errors = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0, said + errors
    assert "\nprice       waited " in said
    (folder,) = (tmp_path / "runs").iterdir()
    steps = [s for line in (folder / "metrics.jsonl").read_text().splitlines() if "step" in (s := json.loads(line))]
    assert len(steps) == STEPS
    bound = 2 if "max_uses=2" in settings else 1
    assert max(step["age/max"] for step in steps) <= bound
    assert all(step["zero_variance"] == 0 for step in steps)
    assert steps[-1]["lost"]["filtered/zero_variance"] > 0
    if bound == 2:
        assert all(step["fresh"] >= 0.5 for step in steps)
        assert any(step["fresh"] < 1 for step in steps)

    audit = start("-m", "asyncrl.cli.main", "buffer", "audit", str(folder), cwd=tmp_path)
    found, errors = audit.communicate(timeout=LIMIT_S)
    assert audit.returncode == 0, found + errors
    assert found.splitlines()[-1] == "clean"


def test_a_task_whose_rewards_are_all_equal_ends_with_advice(start: Start, tmp_path: Path) -> None:
    (tmp_path / "same.py").write_text(SAME)
    settings = [
        "task.type=same:Same",
        "buffer.dynamic_sampling=true",
        "buffer.max_empty_fills=2",
        "eval.at_start=false",
    ]
    flags = [flag for setting in settings for flag in ("--set", setting)]
    run = start("-m", "asyncrl.cli.main", "run", *flags, cwd=tmp_path)
    said, errors = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 1, said + errors
    assert "groups were all left out (buffer.dynamic_sampling)" in errors
    assert "no answer is rewarded" in errors
    assert "raise buffer.max_empty_fills" in errors
