"""What decides the bits of a step besides its groups: written down where a run starts, compared where it is replayed.

Weights after a step follow from the weights before it, the groups in their order, some keys of the recipe, the version
of torch, and how it adds: with how many threads, on which device, over how many ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from asyncrl.config.merge import flatten, is_under
from asyncrl.config.recipe import Recipe, to_builtins

DECIDING = (
    "buffer.max_trajectory_age",
    "buffer.over_age",
    "collector.sampling.max_tokens",  # the divisor of `aggregation: constant`
    "collector.sampling.temperature",
    "learner",
    "model",
    "objective",
    "run.deterministic",
    "run.seed",
    *("task.rewards", "task.tasks"),  # weights of the parts, as gdpo adds them up
)
"""Keys, and what is below them, that a step's arithmetic follows from ..."""

NOT_DECIDING = (
    "learner.checkpoint",
    "learner.groups_per_step",
    "learner.max_low_ess_steps",
    "learner.max_skipped_steps",
    "learner.min_ess",
    "learner.ranks",
    "model.path",
    "model.revision",
)
"""... but for these: how many groups there are is seen in the archive, which weights a run began with by checksum, how
many ranks it really had is with what `machine` says, and limits end a run without changing a step."""


def fix_order() -> None:
    """Have torch compute the same bits from the same inputs in this process: one thread, and of every operation the
    algorithm that adds in a fixed order. Where there is none, the operation will raise RuntimeError when it is used.

    Call it before the first use of a GPU: cuBLAS reads its workspace's size when it starts.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


def settings(recipe: Recipe) -> dict[str, Any]:
    """Dotted key -> value of what of the recipe decides a step's bits."""
    values = flatten(to_builtins(recipe))
    return {key: value for key, value in values.items() if is_under(key, DECIDING) and not is_under(key, NOT_DECIDING)}


def machine(device: torch.device, *, ranks: int) -> dict[str, Any]:
    """What of this process, and those that share its steps, decides them."""
    return {"torch": torch.__version__, "threads": torch.get_num_threads(), "device": device.type, "ranks": ranks}


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Keys whose values differ, one that only one of them has included.

    >>> differences({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4})
    ['b', 'c']
    """
    missing = object()
    return [key for key in sorted({**one, **other}) if one.get(key, missing) != other.get(key, missing)]
