"""`verifiers`: what it takes to score answers, part by part; each module states its own rows, limits and control.

| `part` | module | against |
|---|---|---|
| math | `verifiers_math` | a plain loop of math-verify in one process; the truth by construction |
| hang | `verifiers_hang` | the same answers without one that hangs; no limit |
| code | `verifiers_code` | the same program in a plain subprocess |
"""

from __future__ import annotations

from asyncrl.benchmarks import verifiers_code, verifiers_hang, verifiers_math
from asyncrl.benchmarks.frame import Measured, Say


def measure(*, quick: bool, say: Say) -> Measured:
    """All parts, one after the other: none disturbs another. quick: a tenth of the answers."""
    parts = [module.measure(quick=quick, say=say) for module in (verifiers_math, verifiers_hang, verifiers_code)]
    return Measured(
        rows=[row for part in parts for row in part.rows],
        targets=[target for part in parts for target in part.targets],
    )
