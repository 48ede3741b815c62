"""What the benchmarks read from a run's folder, against a folder whose numbers are known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from asyncrl.benchmarks import first_run
from asyncrl.benchmarks.frame import Row
from asyncrl.benchmarks.runs import RunError, read, train
from asyncrl.buffers.archive import Archive
from asyncrl.schema import Group, Trajectory, VersionSpan, decode, encode
from asyncrl.staleness import Weights
from asyncrl.telemetry.metrics import MetricsWriter


def group(ticket: int, versions: list[int], rewards: list[float]) -> Group:
    """A group whose members all sampled one token per entry of `versions`, after a prompt of two."""
    sampled, total = len(versions), len(versions) + 2
    mask = np.array([0, 0] + [1] * sampled, np.uint8)
    trajectories = [
        Trajectory(
            token_ids=np.arange(total, dtype=np.int32),
            loss_mask=mask,
            logprobs=np.where(mask == 1, -0.5, 0.0).astype(np.float32),
            versions=np.array([-1, -1, *versions], np.int32),
            member=member,
            prompt_length=2,
            spans=tuple(VersionSpan(Weights(1, v), 2 + i, 3 + i, f"{v:016x}") for i, v in enumerate(versions)),
            reward=reward,
            reward_parts={"exact": reward},
            finish_reason="stop",
        )
        for member, reward in enumerate(rewards)
    ]
    return Group(
        ticket=ticket,
        attempt=0,
        lineage=1,
        task="reverse",
        row_id=str(ticket),
        collector="c",
        engine="e",
        sampling={"temperature": 1.0},
        issued=1.0,
        put=2.0,
        trajectories=trajectories,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Thirty steps of one group. Steps 0 and 1 train what version 0 sampled, later ones what the version before and,
    for one token, the one before that did."""
    archive = Archive(tmp_path / "archive")
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    for step in range(30):
        versions = [0, 0] if step < 2 else [step - 2, step - 1]
        rewards = [0.0, 0.5] if step < 2 else [1.0, float("nan")] if step >= 10 else [0.0, 0.0]
        archive.write(1, step, [decode(encode(group(step, versions, rewards)))])
        metrics.write({"step": step + 1, "step_s": 2.0 if step == 5 else 1.0, "wait_s": 0.25})
    metrics.close()
    (tmp_path / "summary.json").write_text(json.dumps({"success_before": 0.25, "success_after": 1.0}))
    return tmp_path


def test_rewards_ages_and_times_are_recomputed_from_the_files(folder: Path) -> None:
    found = read(folder, wall_s=12.0)
    assert found.steps == 30
    assert found.reward_start == pytest.approx(0.25)  # steps 0 and 1 alone
    assert found.reward_end == pytest.approx(1.0)  # the last 20; the unscored are left out
    assert found.age_max == 2
    assert found.age_mean == pytest.approx((28 * 2 * 1.5 + 2 * 2 * 0.5) / 60)
    assert found.tokens == 30 * 2 * 2
    assert found.step_s == 1.0
    assert found.wait_share == pytest.approx(30 * 0.25 / 31)
    assert (found.success_before, found.success_after, found.wall_s) == (0.25, 1.0, 12.0)


def test_a_run_that_fails_is_an_error_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"(?s)ended with code 2.*learner.lerning_rate"):
        train(tmp_path / "run", {"learner.lerning_rate": 1})


def row(**changes: float) -> Row:
    return {"reward_start": 0.2, "reward_end": 0.95, "wall_s": 30.0, "age_max": 1, **changes}


def missed(rows: list[Row], control: Row) -> list[str]:
    return [target.name for target in first_run.targets(rows, control) if not target.met]


def test_one_bad_seed_is_enough_to_miss_a_target() -> None:
    control = row(reward_end=0.2)
    assert missed([row()] * 5, control) == []
    assert len(missed([row()] * 4 + [row(reward_end=0.80)], control)) == 1
    assert len(missed([row()] * 4 + [row(reward_start=0.5)], control)) == 1
    assert len(missed([row()] * 4 + [row(wall_s=91.0)], control)) == 1
    assert len(missed([row()] * 4 + [row(age_max=2)], control)) == 1


def test_a_control_that_reaches_the_target_is_a_missed_target() -> None:
    assert missed([row()], row(reward_end=0.95)) == ["control: last 20 steps without learning"]
