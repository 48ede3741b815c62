"""`bench weights`, transport collective: it runs, in small, between real processes, and each row has its target."""

from __future__ import annotations

import pytest

from asyncrl.benchmarks.weights_collective import OF_BARE, compared, targets


def test_every_row_is_a_share_of_a_bare_broadcast_and_has_its_target() -> None:
    rows = compared(2_000_001, turns=1)
    assert [row["way"] for row in rows] == [*OF_BARE, "pickled"]
    for row in rows:
        assert row["mb"] == 2
        assert row["of_bare"] == pytest.approx(row["bare_ms"] / row["ms"])
    *held, control = targets(rows)
    assert [(target.target, target.better) for target in held] == [(share, "higher") for share in OF_BARE.values()]
    assert (control.target, control.better) == (OF_BARE["hashed"], "lower")
    assert control.value == rows[-1]["of_bare"]
