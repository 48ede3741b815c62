"""`weights`: what it takes to bring new weights to the engines, part by part; each module states its own rows, limits
and control.

| `kind` | module | against |
|---|---|---|
| shm | `weights_shm` | one memcpy of the same bytes |
"""

from __future__ import annotations

from asyncrl.benchmarks import weights_shm
from asyncrl.benchmarks.frame import Measured, Row, Say, Target

PARTS = (weights_shm.measure,)


def measure(*, quick: bool, say: Say) -> Measured:
    """The rows and targets of all parts, one after the other: none disturbs another. quick: smaller ones."""
    rows: list[Row] = []
    targets: list[Target] = []
    for part in PARTS:
        measured = part(quick=quick, say=say)
        rows += measured.rows
        targets += measured.targets
    return Measured(rows, targets)
