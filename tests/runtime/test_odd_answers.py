"""A task that goes wrong in every way a task can: the run goes on, its steps are finite, each way has its name."""

import json
import math
from pathlib import Path

import pytest

from asyncrl.buffers.archive import Archive

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT_S = 240.0
WAYS = ("fine", "equal", "all_fail", "nan", "none", "infinite", "words", "many")

TASK = '''
from asyncrl.tasks.base import Row

WAYS = ["fine", "equal", "all_fail", "raises", "hangs", "nan", "none", "infinite", "words", "many"]
NO_REWARD = {"nan": float("nan"), "none": None, "infinite": float("-inf"), "words": "0.5", "many": [1.0, 0.0, 0.0, 0.0]}


class Odd:
    """Rows of the built-in task, each scored in a way of its own."""

    def rows(self, split):
        digits = [str(100 + 7 * n) for n in range(70)] if split == "train" else ["555", "123"]
        return [
            Row(id=f"{split}-{n}-{WAYS[n % 10]}", prompt=f"reverse {d}", answer=d[::-1], info={"way": WAYS[n % 10]})
            for n, d in enumerate(digits)
        ]

    def score(self, row, answer):
        right = float(answer.finish_reason == "stop" and answer.text == row.answer)
        way = row.info["way"]
        if way == "equal":
            return 1.0
        if way == "all_fail":
            raise ValueError("no answer to this row can be scored")
        if way == "fine" or right:
            return right
        if way == "raises":
            raise KeyError("not right")
        if way == "hangs":
            return float(5**5**5**5)
        return NO_REWARD[way] if way == "many" else {"exact": NO_REWARD[way]}
'''


def test_every_way_of_going_wrong_is_counted_under_its_name(start, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(TASK)
    (tmp_path / "recipe.yaml").write_text(
        "extends: tiny-reverse\n"
        "run: {name: odd, max_steps: 5}\n"
        "task: {type: odd:Odd}\n"
        "collector: {group_size: 4, score_timeout_s: 0.5, score_workers: 2,\n"
        "  max_unscored: null, sampling: {max_tokens: 4}}\n"
        "learner: {groups_per_step: 10}\n"
        "eval: {prompts: 2}\n"
    )
    run = start("-m", "asyncrl.cli.main", "run", "recipe.yaml", cwd=tmp_path)
    said, errors = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0, said + errors

    (folder,) = (tmp_path / "runs").iterdir()
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "step" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5]
    for record in steps:
        assert math.isfinite(record["loss"])
        assert math.isfinite(record["grad_norm"])
        assert not record["skipped"]
    failures = {name for record in steps for name in record["failures"]}
    expected = {"verifier_raised", "verifier_timeout", "verifier_nan", "verifier_none", "verifier_invalid"}
    assert expected <= failures
    assert any(record["zero_variance"] > 0 for record in steps), "all rewards of an `equal` group are the same"
    assert any(record["truncated"] > 0 for record in steps), "four tokens do not hold three digits and the end"
    lost = steps[-1]["lost"]
    assert any(reason.startswith("failed/") and "verifier_raised" in reason for reason in lost), lost

    rows = Archive(folder / "archive").table(columns=["row_id", "reward", "failure"]).to_pylist()
    ways = {way: [r for r in rows if r["row_id"].endswith(way)] for way in WAYS}
    assert not ways["all_fail"], "a group without a single score is not trained"
    assert ways["equal"]
    assert all(r["reward"] == 1.0 for r in ways["equal"])
    assert all(math.isnan(r["reward"]) == bool(r["failure"]) for r in rows), "unscored is NaN with a name, never 0"
    for way, name in (
        ("nan", "nan"),
        ("none", "none"),
        ("infinite", "invalid"),
        ("words", "invalid"),
        ("many", "invalid"),
    ):
        assert {r["failure"] for r in ways[way]} <= {"", f"verifier_{name}"}
        assert any(math.isnan(r["reward"]) for r in ways[way]), way


def test_answers_that_are_empty_or_have_no_end_are_trained_like_others(start, tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(
        "from asyncrl.tasks.base import Row\n"
        "class Short:\n"
        "    def rows(self, split):\n"
        "        return [Row(id=f'{split}-{n}', prompt='reverse ' + str(n), answer='') for n in range(10, 40)]\n"
        "    def score(self, row, answer):\n"
        "        return float(answer.text == '') + 0.5 * float(answer.finish_reason == 'length')\n"
    )
    (tmp_path / "recipe.yaml").write_text(
        "extends: tiny-reverse\n"
        "run: {name: short, max_steps: 12}\n"
        "task: {type: short:Short}\n"
        "collector: {group_size: 8, sampling: {max_tokens: 2, temperature: 3.0}}\n"
        "learner: {groups_per_step: 8}\n"
        "eval: {at_start: false, at_end: false}\n"
    )
    run = start("-m", "asyncrl.cli.main", "run", "recipe.yaml", cwd=tmp_path)
    said, errors = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0, said + errors
    (folder,) = (tmp_path / "runs").iterdir()
    rows = (
        Archive(folder / "archive").table(columns=["reward", "loss_mask", "finish_reason", "prompt_length"]).to_pylist()
    )
    sampled = [sum(row["loss_mask"]) for row in rows]
    assert min(sampled) == 1, "an answer that ends at once consists of its end token"
    assert {"stop", "length"} <= {row["finish_reason"] for row in rows}
    assert any(row["reward"] == 1.0 for row in rows)
