"""Ties tasks to the verifier processes, which know of neither: they import a factory by name and call it."""

from __future__ import annotations

from asyncrl.config import recipe
from asyncrl.config.rewards import Shaping
from asyncrl.rewards.pool import VerifierPool
from asyncrl.rewards.shaping import Rule


def verifier_pool(config: recipe.Task, *, seed: int, max_tokens: int, workers: int, timeout_s: float) -> VerifierPool:
    """A pool, not yet started, whose processes score by the recipe's task. `score` takes a Row and an Answer.
    max_tokens: that an answer may have."""
    arguments = {"task": recipe.to_builtins(config), "seed": seed, "max_tokens": max_tokens}
    rule = Rule(
        shaping=frozenset(part.type for part in config.rewards if isinstance(part, Shaping)),
        scale=config.reward_scale,
        clip=config.reward_clip,
    )
    # Named, not imported: the scorer's module is for the worker, and this one (which needs asyncio) is not.
    return VerifierPool(
        "asyncrl.tasks.scorer:scorer",
        arguments,
        workers=workers,
        timeout_s=timeout_s,
        rule=None if rule == Rule() else rule,
    )
