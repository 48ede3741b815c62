"""Ties tasks to the verifier processes, which know of neither: they import a factory by name and call it."""

from __future__ import annotations

from asyncrl.config import recipe
from asyncrl.config.rewards import Role, declared, part_name
from asyncrl.config.sizes import size_bytes
from asyncrl.rewards.build import REMOTE, remote
from asyncrl.rewards.pool import VerifierPool
from asyncrl.rewards.scoring import Scoring
from asyncrl.rewards.shaping import Rule
from asyncrl.tasks.scorer import replaced


def scoring_of(config: recipe.Task, collector: recipe.Collector, *, seed: int, max_tokens: int) -> Scoring:
    """What scores by the recipe's task, not yet started. `score` takes a Row and an Answer. max_tokens: that an answer
    may have."""
    arguments = {"task": recipe.to_builtins(config), "seed": seed, "max_tokens": max_tokens}
    limit = collector.score_memory_limit
    pool = VerifierPool(
        # Named, not imported: it is the worker that builds it.
        "asyncrl.tasks.scorer:scorer",
        arguments,
        workers=collector.score_workers,
        memory_bytes=None if limit is None else size_bytes(limit),
    )
    numbers = declared(config.rewards)

    def of_role(role: Role) -> frozenset[str]:
        return frozenset(name for name, number in numbers.items() if number.role == role)

    rule = Rule(of_role("constraint"), of_role("violation"), config.reward_scale, config.reward_clip)
    near = [part for part in config.rewards if not isinstance(part, REMOTE)]
    return Scoring(
        pool,
        timeout_s=collector.score_timeout_s,
        limited={part_name(part): part.timeout_s for part in near if part.timeout_s is not None},
        remotes={part_name(part): remote(part) for part in config.rewards if isinstance(part, REMOTE)},
        weights={name: number.weight for name, number in numbers.items()},
        replaced=replaced(config),
        rule=None if rule == Rule() else rule,
    )
