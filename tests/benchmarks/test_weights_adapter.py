"""`bench weights`, adapters: it runs, in small; its bytes are those of the files, its control comes out otherwise."""

from __future__ import annotations

import pytest

from asyncrl.benchmarks import weights_adapter
from asyncrl.benchmarks.weights_adapter import SHAPE, bench, compared, control, targets
from asyncrl.learners.model import ModelError

SMALL = {
    **SHAPE,
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "head_dim": 16,
}


def test_rows_are_of_both_ways_and_the_control_serves_nothing_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    with bench(SMALL) as one:
        rows = compared(one, turns=1, say=said.append)
        factors = sum(p.numel() * 4 for p in one.model.parameters() if p.requires_grad)
        rows.append(control(one, say=said.append))
    assert [(row["way"], row["hashed"]) for row in rows] == [
        ("merged", True), ("adapter", True), ("merged", False), ("adapter", False), ("control", True),
    ]  # fmt: skip
    assert all(row["factors"] == factors for row in rows[:4])
    assert factors <= rows[1]["bytes"] < rows[0]["bytes"]
    assert rows[-1]["served"] == 0
    assert len(said) == len(rows)
    found = targets(rows)
    assert found[0].value == rows[3]["bytes"] / factors
    assert found[1].value == rows[3]["publish_ms"] / rows[2]["publish_ms"]
    assert found[2].met


def test_without_peft_nothing_is_measured_and_no_target_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ModelError("model.lora needs the package peft")

    monkeypatch.setattr(weights_adapter, "SHAPE", SMALL)
    monkeypatch.setattr(weights_adapter, "QUICK_LAYERS", 1)
    monkeypatch.setattr(weights_adapter, "attach", missing)
    said: list[str] = []
    found = weights_adapter.measure(quick=True, say=said.append)
    assert (list(found.rows), said) == ([], ["model.lora needs the package peft"])
    assert [target.met for target in found.targets] == [False] * 3
