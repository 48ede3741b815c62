"""`learner`: what a step of the learner's costs, in time and memory, beside other ways to make it; each module states
its own rows, limits and control.

| `part` | module | against |
|---|---|---|
| packed | `learner_packed` | padded batches |
| shared | `learner_shared` | the same rows, nothing shared |
| step | `learner_trl` | a step of TRL's GRPOTrainer |
| memory | `learner_memory` | log_softmax of all logits |
| checkpoint | `learner_checkpoint` | checkpoints that training waits for |
"""

from __future__ import annotations

from asyncrl.benchmarks import learner_checkpoint, learner_memory, learner_packed, learner_shared, learner_trl
from asyncrl.benchmarks.frame import Measured, Say


def measure(*, quick: bool, say: Say, full: bool = False) -> Measured:
    """All parts, one after the other: none disturbs another. full: larger models where a part has them, and TRL with
    two threads too."""
    parts = [
        learner_packed.measure(quick=quick, say=say, full=full),
        learner_shared.measure(quick=quick, say=say, full=full),
        learner_trl.measure(quick=quick, say=say, full=full),
        learner_memory.measure(quick=quick, say=say),
        learner_checkpoint.measure(quick=quick, say=say),
    ]
    return Measured(
        rows=[row for part in parts for row in part.rows],
        targets=[target for part in parts for target in part.targets],
    )
