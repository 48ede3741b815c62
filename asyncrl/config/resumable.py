"""What may change when a run goes on. The one table that `--resume` is checked by, and that `docs/durability.md` shows.

Whatever is not named here is what the run is: with another value it would be another run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from asyncrl.config.merge import is_under

MAY_CHANGE: dict[str, str] = {
    "run.max_steps": "more steps, or fewer",
    "run.grace_s": "from this start on",
    "run.no_progress_s": "from this start on",
    "buffer.url": "another store is told what was trained, from the archive; a password has to be given again",
    "model.path": "where the same model lies now; with adapters and `objective.beta` its checksum is compared",
    "collector.devices": "this host's",
    "learner.devices": "this host's",
    "learner.ranks": "weights and moments are cut anew; sums are added in another order: the last bits",
    "learner.updates_per_step": "from the next step on",
    "learner.max_tokens_per_microbatch": "sums are added in another order: the last bits",
    "learner.gradient_checkpointing": "memory, not results",
    "learner.cpu_offload": "memory, not results",
    "learner.compile": "speed; sums are added in another order: the last bits",
    "learner.max_restarts": "from this start on",
    "learner.checkpoint": "all its keys; what is kept is decided by the new ones at the next checkpoint",
    "eval.every_steps": "from this start on",
    "eval.n": "from this start on",
    "eval.difficulty": "from this start on",
    "eval.metric": "which checkpoints are the best is decided by it at the next one",
    "telemetry.print_completions": "from this start on",
    "telemetry.tensorboard": "from this start on",
    "telemetry.wandb": "from this start on",
}
"""Keys of the recipe that `--set` may change, they or what is below them, with what then happens."""

AROUND: dict[str, str] = {
    "collectors": "any number, anywhere; those of before may still be there",
    "answers in data files": "what is scored from now on; other prompts, another order, other pass rates are refused",
    "host and folder": "the run's folder may be copied or moved, with `archive/`",
    "versions of torch, transformers, Python; threads; CPU or GPU": "the last bits: `buffer replay` notes it",
    "version of asyncrl": "newer ones read checkpoints of older ones; what an older one cannot read it refuses",
    "the store's content": "what it has forgotten is told again",
}
"""What is no key, and may change too."""


class Changed(NamedTuple):
    """A key that a run keeps, and was given another value for. kept: None where it had no such key."""

    key: str
    kept: Any
    given: Any


def refused(kept: Mapping[str, Any], given: Mapping[str, Any], resumable: Iterable[str]) -> list[Changed]:
    """Of what is `given`, by dotted key, what is neither as it was nor, itself or what it lies below, `resumable`.

    >>> refused({"run.seed": 1, "run.max_steps": 60}, {"run.seed": 2, "run.max_steps": 90}, MAY_CHANGE)
    [Changed(key='run.seed', kept=1, given=2)]
    """
    names = tuple(resumable)
    return [
        Changed(key, kept.get(key), value)
        for key, value in given.items()
        if not is_under(key, names) and not (key in kept and kept[key] == value)
    ]
