"""A run whose sampling leaves tokens out, in real processes: its archive says which ones, and it is trained by that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from asyncrl.buffers.archive import Archive
from asyncrl.schema import pack
from asyncrl.staleness import Weights
from asyncrl.telemetry.metrics import read_metrics, surviving_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_S = 240.0
RECIPE = """
extends: tiny-reverse
run: {name: masked, output_dir: run, max_steps: 3, deterministic: true}
buffer: {max_trajectory_age: 1}
collector: {group_size: 4, sampling: {top_k: 5, top_p: 0.9, min_p: 0.01, min_tokens: 3, temperature: 1.1}}
learner: {groups_per_step: 6}
objective: {preset: grpo, proximal: behaviour-version, beta: 0.01}
weights: {update: recompute}
eval: {at_start: false, at_end: false}
"""


def test_what_could_not_be_drawn_is_archived_and_trained_by(start: Callable[..., Any], tmp_path: Path) -> None:
    """Engine and learner agree under the weights that sampled, at every age; the reference begins as the policy; a
    replay has the same bits. Control: without the masks it has others."""

    def asyncrl(*arguments: str) -> tuple[int, str]:
        process = start("-m", "asyncrl.cli.main", *arguments, cwd=tmp_path)
        said, errors = process.communicate(timeout=LIMIT_S)
        return process.returncode, said + errors

    (tmp_path / "recipe.yaml").write_text(RECIPE)
    code, said = asyncrl("run", "recipe.yaml")
    assert code == 0, said
    steps = surviving_steps(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert len(steps) == 3
    assert steps[0]["mismatch/age0"] < 1e-4
    assert max(step["mismatch/max"] for step in steps) < 1e-4
    assert (steps[0]["kl_reference"], steps[0]["staleness/kl"]) == (0.0, 0.0)
    assert steps[-1]["kl_reference"] != 0.0

    archive = Archive(tmp_path / "run" / "archive")
    packed = pack(archive.groups(Weights(1, 0)))
    assert packed.support is not None
    counts = packed.support.counts[packed.loss_mask == 1]
    assert counts.min() >= 1
    assert counts.max() <= 5

    code, said = asyncrl("buffer", "audit", "run")
    assert code == 0, said
    code, said = asyncrl("buffer", "replay", "run", "--check")
    assert code == 0, said
    for part in archive.branch_parts():
        table = pq.read_table(part)
        pq.write_table(table.drop_columns(["support_counts", "support_ids"]), part)
    code, said = asyncrl("buffer", "replay", "run", "--check")
    assert code == 1, said
    assert "equal up to version 0, DIFFERENT from version 1 on" in said
