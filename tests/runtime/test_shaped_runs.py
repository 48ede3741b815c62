"""Shaping in real processes: the same answers have the same shaped rewards whatever the age they are trained at."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffers.archive import Archive

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT_S = 240.0
MAX_TOKENS, BUFFER_TOKENS, TARGET_TOKENS = 8, 4, 5
PARTS = f"""
    - {{type: overlong, weight: 1.0, buffer_tokens: {BUFFER_TOKENS}}}
    - {{type: length, weight: 0.5, target_tokens: {TARGET_TOKENS}}}
    - {{type: format, weight: 0.25, pattern: "[0-9]+"}}"""
RECIPE = """
extends: tiny-reverse
run: {name: shaped, max_steps: 2, deterministic: true}
task:
  reward_scale: 2.0
  reward_clip: [-1.5, 1.5]
  rewards:PARTS
buffer: {max_trajectory_age: AGE}
collector: {group_size: 4, sampling: {max_tokens: MAX_TOKENS}}
learner: {groups_per_step: 6}
eval: {at_start: false, at_end: true, prompts: 16}
"""

Start = Callable[..., Any]


def trained(start: Start, folder: Path, *, age: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows that a run trained, and its evaluation."""
    folder.mkdir()
    text = RECIPE.replace("PARTS", PARTS).replace("AGE", str(age)).replace("MAX_TOKENS", str(MAX_TOKENS))
    (folder / "recipe.yaml").write_text(text)
    run = start("-m", "asyncrl.cli.main", "run", "recipe.yaml", cwd=folder)
    said, errors = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0, said + errors
    (own,) = (folder / "runs").iterdir()
    names = ["ticket", "member", "token_ids", "loss_mask", "reward", "reward_parts", "finish_reason", "info"]
    (evaluation,) = [json.loads(path.read_text()) for path in sorted((own / "eval").glob("*.json"))]
    return Archive(own / "archive").table(columns=names).to_pylist(), evaluation


def answers(rows: list[dict[str, Any]]) -> dict[Any, float]:
    """Reward by what was answered to which ticket."""
    return {(row["ticket"], row["member"], tuple(row["token_ids"])): row["reward"] for row in rows}


def by_the_formula(row: dict[str, Any], *, over_long: float = 1.0) -> float:
    """over_long: the weight of that part."""
    parts, tokens = dict(row["reward_parts"]), sum(row["loss_mask"])
    cut = row["finish_reason"] == "length"
    over = -1.0 if cut else min(0.0, (MAX_TOKENS - BUFFER_TOKENS - tokens) / BUFFER_TOKENS)
    assert parts["overlong"] == over
    assert parts["length"] == -abs(tokens - TARGET_TOKENS) / MAX_TOKENS
    reward = 2.0 * (parts["exact"] + over_long * over + 0.5 * parts["length"] + 0.25 * parts["format"])
    return max(-1.5, min(1.5, reward))


def test_the_same_answers_have_the_same_shaped_reward_at_age_0_and_at_age_1(start: Start, tmp_path: Path) -> None:
    """Control: without the over-long part, which verl's issue 4268 left out on one side, they have not."""
    (sync, evaluation), (late, _) = (trained(start, tmp_path / str(age), age=age) for age in (0, 1))
    for rows in (sync, late):
        assert all(row["reward"] == pytest.approx(by_the_formula(row)) for row in rows)
        assert all(json.loads(row["info"])["outcome"] == dict(row["reward_parts"])["exact"] for row in rows)
        assert len({row["reward"] for row in rows}) > 3
        assert any(row["reward"] == 1.5 for row in rows), "the clip was reached"
    one, other = answers(sync), answers(late)
    shared = one.keys() & other.keys()
    assert len(shared) >= 24, "the first step's answers are of the same weights and seeds"
    assert all(one[answer] == other[answer] for answer in shared)
    assert {answer["reward"] for answer in evaluation["answers"]} <= {0.0, 1.0}, "success is not shaped"

    without = {answer: by_the_formula(row, over_long=0.0) for answer, row in zip(answers(late), late, strict=True)}
    assert any(one[answer] != without[answer] for answer in shared)
