"""A reward that can be hacked, in real processes: the tiny model finds out what pays, and the run says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.rewards import Format, declared
from asyncrl.learners.evaluation import results_of
from asyncrl.learners.watch import suspicions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]

LIMIT_S = 280.0
STEPS = 26
RECIPE = f"""
extends: tiny-reverse
run: {{name: watched, max_steps: {STEPS}, deterministic: true}}
buffer: {{max_trajectory_age: 0}}  # with it the same bits every time
task:
  rewards:
    - {{type: format, weight: WEIGHT, pattern: ".*7.*7.*"}}  # two sevens anywhere: easier than the right digits
eval: {{every_steps: 10, prompts: 128}}
telemetry: {{print_completions: {{every_steps: 13, n: 2}}}}
"""

Start = Callable[..., Any]


def trained(start: Start, folder: Path, *, weight: float) -> tuple[list[dict[str, Any]], list[str]]:
    """The lines of its metrics, and the signs that its whole history shows: the last evaluation comes after the last
    step, when nobody looks any more, and a loaded machine may skip one in between."""
    folder.mkdir()
    (folder / "recipe.yaml").write_text(RECIPE.replace("WEIGHT", str(weight)))
    run = start("-m", "asyncrl.cli.main", "run", "recipe.yaml", cwd=folder)
    said, errors = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0, said + errors
    (own,) = (folder / "runs").iterdir()
    records = [json.loads(line) for line in (own / "metrics.jsonl").read_text().splitlines()]
    evaluations = sorted(results_of(own / "eval").values(), key=lambda evaluated: evaluated.version)
    steps = [record for record in records if "step" in record]
    numbers = declared([Format(pattern=".", weight=weight)])
    return records, [sign.about for sign in suspicions(steps, evaluations, numbers)]


def of_kind(records: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [record for record in records if record.get("event") == event]


def test_a_run_whose_reward_is_hacked_says_so_and_one_that_cannot_be_does_not(start: Start, tmp_path: Path) -> None:
    hacked, signs = trained(start, tmp_path / "hacked", weight=4.0)
    warnings = {warning["about"]: warning for warning in of_kind(hacked, "warning")}
    assert "is the part format, which says nothing of right or wrong" in warnings["watch/part"]["text"]
    assert "watch/heldout" in signs, "and held-out rows pay for it"
    rewards = [record["reward/mean"] for record in hacked if "step" in record]
    first, *_, last = (event["success"] for event in of_kind(hacked, "eval"))
    assert rewards[-1] > rewards[0] + 1.0, "the reward alone looks like success"
    assert last < first
    samples = of_kind(hacked, "samples")
    assert [event["version"] for event in samples] == [13, 26]
    assert samples[-1]["samples"][-1]["answer"].count("7") >= 2, "the best paid answer shows how"

    honest, signs = trained(start, tmp_path / "honest", weight=0.05)
    assert signs == []
    assert not [warning for warning in of_kind(honest, "warning") if warning["about"].startswith("watch/")]
    assert of_kind(honest, "eval")[-1]["success"] > 0.6
