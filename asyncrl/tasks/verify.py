"""Ties tasks to the verifier processes, which know of neither: they import a factory by name and call it."""

from __future__ import annotations

import msgspec

from asyncrl.config import recipe
from asyncrl.rewards.pool import VerifierPool


def verifier_pool(config: recipe.Task, *, seed: int, workers: int, timeout_s: float) -> VerifierPool:
    """A pool, not yet started, whose processes score by the recipe's task. `score` takes a Row and an Answer."""
    arguments = {"kind": type(config).__name__, "task": msgspec.to_builtins(config), "seed": seed}
    # Named, not imported: the scorer's module is for the worker, and this one (which needs asyncio) is not.
    return VerifierPool("asyncrl.tasks.scorer:scorer", arguments, workers=workers, timeout_s=timeout_s)
