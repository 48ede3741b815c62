"""`bench weights`, transport delta: it runs, in small; what it counts is what changed."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.benchmarks import weights_delta
from asyncrl.benchmarks.weights_delta import DENSITIES, _controls, _density, _moved, _weights


@pytest.mark.parametrize("share", [DENSITIES[0], DENSITIES[-1]])
def test_a_row_tells_what_changed_and_how_much_smaller_it_is(share: float) -> None:
    old = _weights(400_000)
    new = _moved(old, share)
    row = _density(old, new, turns=1)
    assert row["density"] == np.mean(old.view(np.int16) != new.view(np.int16)) == pytest.approx(share, rel=0.1)
    assert row["saving"] == old.size / row["bytes"] > 1
    assert row["overhead"] < 1.1
    assert row["equal"] == 1
    assert min(row["encode_gb_s"], row["apply_gb_s"], row["copy_gb_s"]) > 0


def test_the_controls_come_out_on_the_other_side() -> None:
    assert _controls() == (False, False)


def test_targets_are_of_all_densities_and_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_delta, "_weights", lambda elements: _weights(min(elements, 400_000)))
    said: list[str] = []
    measured = weights_delta.measure(quick=True, say=said.append)
    assert len(measured.rows) == len(said) == len(DENSITIES)
    assert [target.met for target in measured.targets] == [True] * 4
