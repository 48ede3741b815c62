"""`weights`: what it takes to bring new weights to the engines, part by part; each module states its own rows, limits
and control.

| `kind` | module | against |
|---|---|---|
| shm | `weights_shm` | one memcpy of the same bytes |
| collective | `weights_collective` | a bare broadcast of the same bytes |
| delta | `weights_delta` | changes counted in another way; a copy of the same bytes |
| adapter | `weights_adapter` | merged weights; a count of A and B |
| pause | `weights_pause` | a step of the SmolLM2 recipe |
| churn | `weights_churn` | the deadline; what was published |
"""

from __future__ import annotations

from asyncrl.benchmarks import (
    weights_adapter,
    weights_churn,
    weights_collective,
    weights_delta,
    weights_pause,
    weights_shm,
)
from asyncrl.benchmarks.frame import Measured, Say


def measure(*, quick: bool, say: Say, full: bool = False) -> Measured:
    """All parts, one after the other: none disturbs another. quick: smaller rows. full: a real run for the delta."""
    parts = [
        weights_shm.measure(quick=quick, say=say),
        weights_collective.measure(quick=quick, say=say),
        weights_delta.measure(quick=quick, say=say, full=full),
        weights_adapter.measure(quick=quick, say=say),
        weights_pause.measure(quick=quick, say=say),
        weights_churn.measure(quick=quick, say=say),
    ]
    return Measured(
        rows=[row for part in parts for row in part.rows],
        targets=[target for part in parts for target in part.targets],
    )
