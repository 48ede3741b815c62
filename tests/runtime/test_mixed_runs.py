"""A mixture with a curriculum in real processes: the mix, the names, and the same rows after a resume."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffers.archive import Archive
from asyncrl.config.loading import load_recipe
from asyncrl.tasks.build import build_task
from asyncrl.tasks.training import train_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT_S = 120.0
RECIPE = """
extends: tiny-reverse
run: {name: mixed, max_steps: 4, deterministic: true, output_dir: out}
task:
  type: mixture
  tasks:
    - name: short
      weight: 3
      task: {type: reverse, digits: [1, 2], curriculum: {pass_rates: rates.json, max: 0.5}}
    - name: long
      task: {type: reverse, digits: [3, 4], rewards: [{type: length, target_tokens: 4, weight: 0.5}]}
collector: {group_size: 2}
learner: {groups_per_step: 16}
eval: {at_start: false, prompts: 8}
"""
KNOWN = [f"short/train-{n}" for n in range(60)]
"""Of 180 rows, those that are left out."""

Start = Callable[..., Any]


def run(start: Start, folder: Path, *arguments: str) -> None:
    process = start("-m", "asyncrl.cli.main", "run", *arguments, cwd=folder)
    said, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said + errors


def test_a_run_that_goes_on_asks_what_it_would_have_asked(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    answers = [{"row_id": row_id, "reward": 1.0} for row_id in KNOWN]
    (tmp_path / "rates.json").write_text(json.dumps({"answers": answers}))
    run(start, tmp_path, "recipe.yaml", "--set", "run.max_steps=2")
    run(start, tmp_path, "--resume", "out", "--set", "run.max_steps=4")
    names = ["ticket", "task", "row_id", "reward_parts"]
    rows = Archive(tmp_path / "out" / "archive").table(columns=names).to_pylist()

    monkeypatch.chdir(tmp_path)
    config = load_recipe("recipe.yaml").recipe.task
    row_of = train_rows(build_task(config, seed=0), config, seed=0)
    assert {row["ticket"] for row in rows} == set(range(64))
    assert all(row["row_id"] == row_of(row["ticket"]).id for row in rows)

    groups = {row["ticket"]: row for row in rows}
    assert Counter(row["task"] for row in groups.values()) == {"short": 48, "long": 16}, "3 to 1"
    drawn = Counter(row["row_id"] for row in groups.values() if row["task"] == "short")
    assert not drawn.keys() & set(KNOWN), "control: without the curriculum most would be of these"
    parts = {
        task: {name for row in rows if row["task"] == task for name, _ in row["reward_parts"]}
        for task in ("short", "long")
    }
    assert parts == {"short": {"exact"}, "long": {"exact", "length"}}

    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "reward/mean" in record]
    for step in steps:
        mixed = 0.75 * step["reward/mean/short"] + 0.25 * step["reward/mean/long"]
        assert step["reward/mean"] == pytest.approx(mixed)
    evaluation, *_ = [json.loads(path.read_text()) for path in (tmp_path / "out" / "eval").glob("*.json")]
    assert Counter(answer["task"] for answer in evaluation["answers"]) == {"short": 4, "long": 4}, "evenly"
