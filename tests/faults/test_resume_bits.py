"""A run with `run.deterministic` that is killed and goes on, beside one that nobody kills: `bench resume` in short."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.benchmarks.resume import (
    AGE,
    CONTROLS,
    EVERY_STEPS,
    LOSING,
    SETTINGS,
    STEPS,
    Kill,
    Kind,
    killed,
    undisturbed,
)
from asyncrl.benchmarks.resume_child import MOMENTS
from asyncrl.benchmarks.resume_left import Left, Trained

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(600)]


def test_killed_at_age_0_and_resumed_a_run_has_the_bits_of_one_that_nobody_killed(tmp_path: Path) -> None:
    wanted = undisturbed(tmp_path / "undisturbed", 0)
    for number, kill in enumerate((Kill("tree", LOSING, 0.4), Kill("learner", 2 * EVERY_STEPS + 1, 0.7))):
        row = killed(tmp_path / str(number), Kind("kill", 0), kill, wanted)
        assert row["equal"], row
        assert row["resumed_from"] is not None, row
    # Negative control: what the moments are resumed for.
    (without,) = (control for control in CONTROLS if control.left_out == MOMENTS)
    row = killed(tmp_path / "control", without, Kill("tree", LOSING, 0.4), wanted)
    assert row["differs"].startswith("tokens, log-probs or rewards of step"), row


def test_killed_at_a_higher_age_a_run_trains_in_each_step_the_prompts_that_are_its_own(tmp_path: Path) -> None:
    B = SETTINGS["learner.groups_per_step"]
    in_order = tuple(Trained(tuple(range(n * B, n * B + B)), digest="") for n in range(STEPS))
    wanted = Left(in_order, weights="", optimizer="", random="")  # of which only the prompts are compared
    row = killed(tmp_path / "killed", Kind("kill", AGE), Kill("tree", LOSING + 2, 0.5), wanted)
    assert row["equal"], row
