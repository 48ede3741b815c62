"""`bench memory`, one row of it: what was planned is what a real run takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.benchmarks.memory import MODELS, ROOM, SETTINGS, compare


@pytest.mark.slow
def test_the_learners_measured_peak_is_what_was_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = compare(tmp_path, MODELS["19 M"], SETTINGS)
    assert found.least / ROOM < found.peak < found.most * ROOM
    # Control: the activations are what makes the difference, and a plan without them is told.
    assert not found.peak < found.without * ROOM
