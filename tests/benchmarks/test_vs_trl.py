"""What `vs-trl` makes of two sides' runs; that TRL itself learns is measured by its own control."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.benchmarks.runs import RunError
from asyncrl.benchmarks.vs_trl import (
    _call,
    agreement,
    on_cores,
    order,
    read_own,
    seconds_to,
    steadiness,
    step_seconds,
    targets,
)
from asyncrl.buffers.archive import Archive
from asyncrl.schema import Group, Trajectory, VersionSpan, decode, encode
from asyncrl.staleness import Weights
from asyncrl.telemetry.metrics import MetricsWriter


def row(
    side: str,
    tokens_per_s: float,
    arrival: float | None = 3.0,
    reward_end: float = 0.9,
    threads: int = 1,
    turn: int = 1,
) -> dict[str, Any]:
    values = {"tokens_per_s": tokens_per_s, "seconds_to_reward": arrival, "reward_end": reward_end}
    return {"side": side, "threads": threads, "turn": turn, **values}


def turns(**speeds: list[float]) -> list[dict[str, Any]]:
    """Rows by "asyncrl", "trl1" and "trl2": a value a turn."""
    sides = {"asyncrl": ("asyncrl", 1), "trl1": ("trl", 1), "trl2": ("trl", 2)}
    return [
        row(sides[name][0], speed, threads=sides[name][1], turn=turn)
        for name, values in speeds.items()
        for turn, speed in enumerate(values, start=1)
    ]


def test_a_moving_average_that_starts_at_the_goal_is_there_after_one_step() -> None:
    assert seconds_to(0.8, [0.5, 1.0], [0.8, 0.1]) == 0.5


def test_one_lucky_step_does_not_count_as_having_learnt() -> None:
    assert seconds_to(0.8, [1.0, 2.0, 3.0], [0.2, 1.0, 0.2]) is None


def test_the_first_step_is_no_step_time() -> None:
    assert step_seconds([5.0, 5.25, 5.75]) == [0.25, 0.5]


def test_targets_are_ratios_of_medians_to_the_better_median_of_trl() -> None:
    rows = turns(trl1=[3000.0, 2000.0, 9000.0], trl2=[2900.0, 2500.0, 9500.0], asyncrl=[6000.0, 4500.0, 100.0])
    rows += [row("control", 900.0)]
    for found in rows:
        found["seconds_to_reward"] = {("trl", 1): 5.0, ("trl", 2): 4.0}.get((found["side"], found["threads"]), 2.0)
    speed, arrival, learnt, slow = targets(rows)
    assert (speed.value, speed.met) == (1.5, True)  # 4500 to 3000, the median with one thread
    assert (arrival.value, arrival.met) == (0.5, True)  # 2 to 4, the median with two
    assert (learnt.value, learnt.met) == (0.9, True)
    assert (slow.value, slow.met) == (0.3, True)


def test_a_number_of_threads_with_which_trl_does_not_learn_voids_the_comparison() -> None:
    rows = turns(trl1=[1000.0], asyncrl=[2000.0])
    rows += [row("trl", 1000.0, arrival=None, reward_end=0.2, threads=2), row("control", 500.0)]
    _, arrival, learnt, _ = targets(rows)
    assert (arrival.value, arrival.met) == (1.0, True)  # to the one that arrived
    assert (learnt.value, learnt.met) == (0.2, False)


def test_where_trl_never_arrives_there_is_no_ratio() -> None:
    rows = [row("trl", 1000.0, arrival=None, threads=threads) for threads in (1, 2)]
    _, arrival, _, _ = targets([*rows, row("asyncrl", 2000.0), row("control", 500.0)])
    assert (arrival.value, arrival.met) == (None, False)


def test_a_control_as_fast_as_the_real_thing_is_a_missed_target() -> None:
    *_, slow = targets([*turns(trl1=[1000.0], trl2=[900.0], asyncrl=[2000.0]), row("control", 2000.0)])
    assert not slow.met


def test_each_side_begins_as_many_turns_as_another_and_all_take_part() -> None:
    begun = [order(turn)[0] for turn in range(1, 7)]
    assert {side: begun.count(side) for side in begun} == dict.fromkeys(order(1), 2)
    assert all(sorted(order(turn)) == sorted(order(1)) for turn in range(1, 7))


def test_how_far_the_turns_agree_is_told_from_turns_and_not_from_the_control() -> None:
    rows = turns(trl1=[1000.0, 1100.0, 900.0], trl2=[800.0, 1200.0, 900.0], asyncrl=[2000.0, 1200.0, 1800.0])
    *each, whole = agreement([*rows, row("control", 1.0)])
    assert [(found["turn"], found["tokens_per_s"]) for found in each] == [(1, 2.0), (2, 1.0), (3, 2.0)]
    assert (whole["turns"], whole["turns_met"], whole["trl_threads"]) == (3, 2, 1)
    assert whole["spread_asyncrl"] == pytest.approx(800 / 1800)
    assert whole["ratio_low"] < 1.8 < whole["ratio_high"]


def test_turns_that_agree_leave_no_doubt_and_turns_that_do_not_leave_much() -> None:
    same, apart = [[1.5 * peer for peer in (1.0, 2.0, 4.0, 3.0, 5.0)], [9.0, 3.0, 4.5, 2.0, 14.0]]
    peers = {1: [1.0, 2.0, 4.0, 3.0, 5.0], 2: [0.9, 1.9, 3.9, 2.9, 4.9]}
    assert steadiness(same, peers) == pytest.approx((1.5, 1.5))
    low, high = steadiness(apart, peers)
    assert low < 1.0 < 1.5 < high


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
