"""A mixture with a curriculum in real processes: the mix, the names, and the same rows after a resume."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from pathlib import Path
from subprocess import Popen

import psutil
import pytest

from asyncrl.buffers.archive import Archive
from asyncrl.config.loading import load_recipe
from asyncrl.tasks.build import build_task
from asyncrl.tasks.training import train_rows
from tests.processes import ASYNCRL, Start, within

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT_S = 120.0
RECIPE = """
extends: tiny-reverse
run: {name: mixed, deterministic: true, output_dir: out}
task:
  type: mixture
  tasks:
    - name: short
      weight: 3
      task: {type: reverse, digits: [1, 2], curriculum: {pass_rates: rates.json, max: 0.5}}
    - name: long
      task: {type: reverse, digits: [3, 4], rewards: [{type: length, target_tokens: 4, weight: 0.5}]}
collector: {group_size: 2}
learner: {groups_per_step: 16, checkpoint: {every_steps: 1}}
eval: {at_start: false, prompts: 8}
"""
KNOWN = [f"short/train-{n}" for n in range(60)]
"""Of 180 rows, those that are left out."""


def rates(folder: Path, known: list[str]) -> None:
    answers = [{"row_id": row_id, "reward": 1.0} for row_id in known]
    (folder / "rates.json").write_text(json.dumps({"answers": answers}))


def steps(folder: Path) -> int:
    archive = folder / "out" / "archive"
    return len(list(archive.glob("step-*.parquet")))


def kill_all(process: Popen[str]) -> None:
    """With -9: the run and all that it has started."""
    doomed = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for one in doomed:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(doomed, timeout=LIMIT_S)


def test_a_run_that_was_killed_and_goes_on_asks_what_it_would_have_asked(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    rates(tmp_path, KNOWN)
    process = start(*ASYNCRL, "run", "recipe.yaml", "--set", "run.max_steps=5000", cwd=tmp_path)
    assert within(LIMIT_S, lambda: steps(tmp_path) >= 2 or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    kill_all(process)
    asked = steps(tmp_path)

    rates(tmp_path, KNOWN[:-1])
    refused = start(*ASYNCRL, "run", "--resume", "out", cwd=tmp_path)
    _, said = refused.communicate(timeout=LIMIT_S)
    assert refused.returncode == 2
    assert "task.tasks[0].task.curriculum.pass_rates rates.json has other pass rates than the run began with" in said

    rates(tmp_path, KNOWN)
    (tmp_path / "rates.json").touch()
    last = asked + 2
    resumed = start(*ASYNCRL, "run", "--resume", "out", "--set", f"run.max_steps={last}", cwd=tmp_path)
    assert resumed.wait(timeout=LIMIT_S) == 0, resumed.communicate()
    names = ["ticket", "task", "row_id", "reward_parts"]
    rows = Archive(tmp_path / "out" / "archive").table(columns=names).to_pylist()

    monkeypatch.chdir(tmp_path)
    config = load_recipe("recipe.yaml").recipe.task
    row_of = train_rows(build_task(config, seed=0), config, seed=0)
    assert {row["ticket"] for row in rows} == set(range(16 * last))
    assert all(row["row_id"] == row_of(row["ticket"]).id for row in rows)

    groups = {row["ticket"]: row for row in rows}
    assert Counter(row["task"] for row in groups.values()) == {"short": 12 * last, "long": 4 * last}, "3 to 1"
    drawn = Counter(row["row_id"] for row in groups.values() if row["task"] == "short")
    assert not drawn.keys() & set(KNOWN), "control: without the curriculum most would be of these"
    parts = {
        task: {name for row in rows if row["task"] == task for name, _ in row["reward_parts"]}
        for task in ("short", "long")
    }
    assert parts == {"short": {"exact"}, "long": {"exact", "length"}}

    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    for step in (record for record in records if "reward/mean" in record):
        mixed = 0.75 * step["reward/mean/short"] + 0.25 * step["reward/mean/long"]
        assert step["reward/mean"] == pytest.approx(mixed)
    evaluation, *_ = [json.loads(path.read_text()) for path in (tmp_path / "out" / "eval").glob("*.json")]
    assert Counter(answer["task"] for answer in evaluation["answers"]) == {"short": 4, "long": 4}, "evenly"
