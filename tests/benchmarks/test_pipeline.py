"""`bench pipeline`: which rows it has, and what a row must be to meet its targets."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import pytest

from asyncrl.benchmarks.frame import Row
from asyncrl.benchmarks.pipeline import settings, targets
from asyncrl.benchmarks.pipeline_model import Pipeline


def test_twelve_rows_and_the_other_two_policies_by_default_and_all_on_request() -> None:
    def rows(**which: bool) -> Counter[str]:
        return Counter(setting.policy for setting in settings(**{"quick": False, "full": False, **which}))

    assert rows() == {"wait": 6, "drop": 6, "mask": 2, "requeue": 2}
    assert rows(full=True) == {"wait": 30, "drop": 30, "mask": 2, "requeue": 2}
    assert rows(quick=True) == {"wait": 2, "drop": 2}


def row(policy: str, k: int, **changes: Any) -> Row:
    """A row that meets every target."""
    found = {
        **asdict(Pipeline(k=k, policy=policy)),  # type: ignore[arg-type]
        "max_age": k,
        "efficiency": 0.96 * 0.2 * (k + 1),
        "model_efficiency": 0.2 * (k + 1),
        "of_model": 0.96,
        "lost": 0.0 if policy == "wait" else 0.05,
        "model_lost": 0.0 if policy == "wait" else 0.05,
        "lost_apart": 0.0,
        "length_ratio_apart": 0.5,
        "lost_length_ratio_apart": None if policy == "wait" else 2.0,
    }
    return {**found, **changes}


GOOD = [row("wait", 0), row("wait", 1), row("drop", 1), row("mask", 1)]
CONTROL = row("drop", 1, max_age=7, lost=0.0)


def missed(rows: list[Row], control: Row = CONTROL) -> list[str]:
    return [target.name for target in targets(rows, control) if not target.met]


def test_rows_like_the_model_meet_every_target() -> None:
    assert missed(GOOD) == []


@pytest.mark.parametrize(
    ("number", "change"),
    [
        (0, {"of_model": 0.94}),
        (1, {"lost": 0.001}),
        (2, {"max_age": 2}),
        (2, {"lost_apart": 3.1}),
        (2, {"length_ratio_apart": 3.1}),
        (2, {"lost_length_ratio_apart": 3.1}),
        (3, {"max_age": 2}),
    ],
)
def test_one_number_that_is_off_misses_one_target(number: int, change: dict[str, Any]) -> None:
    rows = [{**row, **change} if n == number else row for n, row in enumerate(GOOD)]
    assert len(missed(rows)) == 1


@pytest.mark.parametrize("change", [{"max_age": 1}, {"lost": 0.05}])
def test_a_control_that_keeps_the_bound_is_a_missed_target(change: dict[str, Any]) -> None:
    assert len(missed(GOOD, {**CONTROL, **change})) == 1


def test_an_age_that_gains_nothing_is_a_missed_target() -> None:
    assert len(missed([{**GOOD[0], "efficiency": 0.96 * 0.4}, *GOOD[1:]])) == 1
