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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_S = 200.0  # of one command: two busy cores, and the built-in model once
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


PLAYED = """
extends: tiny-reverse
run: {name: played, max_steps: 3, deterministic: true, output_dir: out}
task:
  type: mixture
  tasks:
    - {name: plain, weight: 2, task: {type: reverse, digits: [1, 2]}}
    - {name: tools, task: {type: "tasks_of_a_run:Tooled"}}
    - {name: game, task: {type: "tasks_of_a_run:Game"}}
collector: {group_size: 2, max_turns: 3}
learner: {groups_per_step: 4}
objective: {advantage: gdpo}
eval: {at_start: false, prompts: 6}
"""

TASKS = '''
from asyncrl.environments.base import Step
from asyncrl.tasks.base import Row

def twice(n: int) -> int:
    """Twice a number.

    Args:
        n: The number.
    """
    return 2 * n

class Tooled:
    tools = [twice]
    def rows(self, split): return [Row(f"{split}/{n}", f"twice {n}", answer=str(2 * n)) for n in range(10)]
    def score(self, row, answer): return {"right": float(answer.text == row.answer)}

class Three:
    """Over after the third answer, whatever was said."""
    def reset(self, row, seed):
        self.answers = 0
        return [{"role": "user", "content": f"go on {row.id}"}]
    def step(self, answer):
        self.answers += 1
        if self.answers == 3:
            return Step(done=True, reward=1.0)
        return Step([{"role": "user", "content": "more"}], reward=len(answer.text) / 100)

class Game:
    def rows(self, split): return [Row(f"g{n}", "a game") for n in range(10)]
    def environment(self): return Three()
'''


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


def test_tasks_of_one_and_of_several_answers_are_trained_and_evaluated_together(start: Start, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(PLAYED)
    (tmp_path / "tasks_of_a_run.py").write_text(TASKS)
    process = start(*ASYNCRL, "run", "recipe.yaml", cwd=tmp_path)
    said, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said + errors
    rows = Archive(tmp_path / "out" / "archive").table().to_pylist()
    first = [row for row in rows if row["segment"] == 0]
    assert Counter(row["task"] for row in first) == {"plain": 12, "tools": 6, "game": 6}, "2 to 1 to 1, in each step"
    assert all(row["row_id"].startswith(f"{row['task']}/") for row in rows)
    by_task = {name: [row for row in first if row["task"] == name] for name in ("plain", "tools", "game")}
    parts = {name: {part for row in of for part, _ in row["reward_parts"]} for name, of in by_task.items()}
    assert parts == {"plain": {"exact"}, "tools": {"right"}, "game": {"turns"}}
    whole = [row for row in by_task["game"] if "ended_by" not in json.loads(row["info"])]  # no answer was cut off
    assert whole
    assert all(json.loads(row["info"])["turns"] == 3 for row in whole)
    assert all(row["reward"] >= 1.0 for row in whole), "the last turn's, and what each answer before earned"
    assert {len(row["turn_offsets"]) for row in by_task["plain"]} == {1}

    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    for step in (record for record in records if "reward/mean" in record):
        assert all(step[f"reward/mean/{name}"] is not None for name in by_task), "in order, each batch has all of them"
        assert step["turns/mean"] > 1
    evaluation, *_ = [json.loads(path.read_text()) for path in (tmp_path / "out" / "eval").glob("*.json")]
    assert Counter(answer["task"] for answer in evaluation["answers"]) == {"plain": 2, "tools": 2, "game": 2}
    assert all(answer["reward"] is not None for answer in evaluation["answers"])
