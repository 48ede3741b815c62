"""What `vs-trl` makes of two sides' runs; that TRL itself learns is measured by its own control."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.benchmarks.runs import RunError
from asyncrl.benchmarks.vs_trl import _call, on_cores, read_own, seconds_to, step_seconds, targets
from asyncrl.buffers.archive import Archive
from asyncrl.schema import Group, Trajectory, VersionSpan, decode, encode
from asyncrl.staleness import Weights
from asyncrl.telemetry.metrics import MetricsWriter


def row(side: str, tokens_per_s: float, arrival: float | None = 3.0, reward_end: float = 0.9) -> dict[str, Any]:
    return {"side": side, "tokens_per_s": tokens_per_s, "seconds_to_reward": arrival, "reward_end": reward_end}


def test_a_moving_average_that_starts_at_the_goal_is_there_after_one_step() -> None:
    assert seconds_to(0.8, [0.5, 1.0], [0.8, 0.1]) == 0.5


def test_one_lucky_step_does_not_count_as_having_learnt() -> None:
    assert seconds_to(0.8, [1.0, 2.0, 3.0], [0.2, 1.0, 0.2]) is None


def test_the_first_step_is_no_step_time() -> None:
    assert step_seconds([5.0, 5.25, 5.75]) == [0.25, 0.5]


def test_targets_are_ratios_of_medians_and_the_probes_do_not_count() -> None:
    rows = [row("trl-probe", 9000.0)]
    rows += [row("trl", speed) for speed in (3000.0, 2000.0, 9000.0)]
    rows += [row("asyncrl", speed, arrival=2.0) for speed in (6000.0, 4500.0, 100.0)]
    rows += [row("control", 900.0)]
    speed, arrival, learnt, slow = targets(rows)
    assert (speed.value, speed.met) == (1.5, True)
    assert (arrival.value, arrival.met) == (pytest.approx(2 / 3), True)
    assert (learnt.value, learnt.met) == (0.9, True)
    assert (slow.value, slow.met) == (0.3, True)


def test_a_peer_that_did_not_learn_voids_the_comparison() -> None:
    rows = [row("trl", 1000.0, arrival=None, reward_end=0.2), row("asyncrl", 2000.0), row("control", 500.0)]
    _, arrival, learnt, _ = targets(rows)
    assert (arrival.value, arrival.met, learnt.met) == (None, False, False)


def test_a_control_as_fast_as_the_real_thing_is_a_missed_target() -> None:
    *_, slow = targets([row("trl", 1000.0), row("asyncrl", 2000.0), row("control", 2000.0)])
    assert not slow.met


def test_a_run_folder_is_read_from_its_first_ticket_to_the_end_of_its_last_step(tmp_path: Path) -> None:
    archive, metrics = Archive(tmp_path / "archive"), MetricsWriter(tmp_path / "metrics.jsonl")
    for step, rewards in enumerate([[0.0, 1.0], [1.0, 1.0]]):
        trajectories = [
            Trajectory(
                token_ids=np.arange(5, dtype=np.int32),
                loss_mask=np.array([0, 0, 1, 1, 1], np.uint8),
                logprobs=np.array([0, 0, -1, -1, -1], np.float32),
                versions=np.array([-1, -1, step, step, step], np.int32),
                member=member,
                prompt_length=2,
                spans=(VersionSpan(Weights(1, step), 2, 5, f"{step:016x}"),),
                reward=reward,
                reward_parts={"exact": reward},
                finish_reason="stop",
            )
            for member, reward in enumerate(rewards)
        ]
        group = Group(
            ticket=step,
            attempt=0,
            lineage=1,
            task="reverse",
            row_id=str(step),
            collector="c",
            engine="e",
            sampling={"temperature": 1.0},
            issued=100.0 + step,
            put=101.0 + step,
            trajectories=trajectories,
        )
        archive.write(1, step, [decode(encode(group))])
        metrics.write({"step": step + 1, "time": 102.0 + 2 * step})
    metrics.close()
    trace = read_own(tmp_path)
    assert (trace.ended, trace.rewards, trace.tokens) == ([2.0, 4.0], [0.5, 1.0], [6, 6])
    found = trace.row("asyncrl", 1, 1)
    assert (found["step_s"], found["tokens_per_s"], found["seconds_to_reward"]) == (2.0, 3.0, None)


def test_cores_are_given_back() -> None:
    before = os.sched_getaffinity(0)
    with on_cores(1):
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before


def test_a_command_that_fails_is_quoted_with_its_last_words() -> None:
    with pytest.raises(RunError, match=r"(?s)ended with code 3:.*no such trainer"):
        _call(["/bin/sh", "-c", "echo no such trainer >&2; exit 3"], limit_s=20.0)
