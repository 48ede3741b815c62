"""A run whose members are several rows each, in real processes: an agent that begins a new conversation in between."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffers.archive import Archive
from asyncrl.telemetry.metrics import read_metrics, surviving_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_S = 240.0
RECIPE = """
extends: tiny-reverse
run: {name: segmented, output_dir: run, max_steps: 2, deterministic: true}
task: {type: agent, agent: forgetful:run, data: {train: train.jsonl, heldout: heldout.jsonl}}
buffer: {max_trajectory_age: 1}
collector: {group_size: 4, max_turns: 2}
objective: {preset: gspo, epsilon: 0.1, epsilon_high: 0.1}
learner: {groups_per_step: 6, max_tokens_per_microbatch: 64}
eval: {at_start: false, at_end: false}
"""
AGENT = """
async def run(row, endpoint):
    answers = []
    for text in (row.prompt, row.prompt[::-1]):
        messages = [{"role": "user", "content": f"reverse {text}"}]
        said = await endpoint.client().chat.completions.create(model="policy", messages=messages)
        answers.append(said.choices[0].message.content)
    return {"there": float(answers[0] == row.answer), "back": 0.5 * (answers[1] == row.prompt)}
"""


def test_an_agent_that_begins_anew_is_one_member_of_two_rows(start: Callable[..., Any], tmp_path: Path) -> None:
    """By an objective of whole answers, whose rows do not fit into one micro-batch; its replay has the same bits."""

    def asyncrl(*arguments: str) -> tuple[int, str]:
        process = start("-m", "asyncrl.cli.main", *arguments, cwd=tmp_path)
        said, errors = process.communicate(timeout=LIMIT_S)
        return process.returncode, said + errors

    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "forgetful.py").write_text(AGENT)
    for split, numbers in (("train", range(1000, 1100)), ("heldout", range(2000, 2010))):
        rows = [json.dumps({"prompt": str(n), "answer": str(n)[::-1]}) for n in numbers]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    code, said = asyncrl("run", "recipe.yaml")
    assert code == 0, said
    steps = surviving_steps(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert [(step["turns/mean"], step["segments/mean"]) for step in steps] == [(2.0, 2.0)] * 2
    assert steps[0]["mismatch/age0"] < 1e-4

    table = Archive(tmp_path / "run" / "archive").table()
    assert table["segment"].to_pylist() == [0, 1] * (2 * 6 * 4)
    assert table["member"].to_pylist() == [0, 0, 1, 1, 2, 2, 3, 3] * (2 * 6)
    rewards, lengths = table["reward"].to_pylist(), [sum(mask) for mask in table["loss_mask"].to_pylist()]
    assert rewards[::2] == rewards[1::2]
    first = slice(0, 2 * 6 * 4)
    assert steps[0]["reward/mean"] == pytest.approx(sum(rewards[first]) / len(rewards[first]))
    assert steps[0]["length/mean"] == pytest.approx(2 * sum(lengths[first]) / len(lengths[first]))

    code, said = asyncrl("buffer", "replay", "run", "--check")
    assert code == 0, said
