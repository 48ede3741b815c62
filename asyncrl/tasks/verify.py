"""Ties tasks to the verifier processes, which know of neither: they import a factory by name and call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from asyncrl.config import recipe
from asyncrl.config.rewards import Role, declared, part_name
from asyncrl.config.sizes import size_bytes
from asyncrl.rewards.build import REMOTE, remote
from asyncrl.rewards.pool import VerifierPool
from asyncrl.rewards.scoring import Scores, Scoring, ScoringByTask
from asyncrl.rewards.shaping import Rule
from asyncrl.tasks.mixture import task_of, weights_of
from asyncrl.tasks.scorer import replaced


def scoring_of(config: recipe.Task, collector: recipe.Collector, *, seed: int, max_tokens: int) -> Scores:
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
    if not isinstance(config, recipe.MixtureTask):
        return _scoring(pool, config, collector.score_timeout_s)
    scorings = {
        name: _scoring(pool, one, collector.score_timeout_s, own=partial(weights_of, name))
        for name, one in recipe.mixed_tasks(config).items()
    }
    return ScoringByTask(scorings, task_of)


def _scoring(
    pool: VerifierPool,
    config: recipe.SingleTask,
    timeout_s: float,
    *,
    own: Callable[[Mapping[str, float]], Mapping[str, float]] = dict,
) -> Scoring:
    """The scoring of one task by processes that may score others too."""
    numbers = declared(config.rewards)

    def of_role(role: Role) -> frozenset[str]:
        return frozenset(name for name, number in numbers.items() if number.role == role)

    rule = Rule(of_role("constraint"), of_role("violation"), config.reward_scale, config.reward_clip)
    near = [part for part in config.rewards if not isinstance(part, REMOTE)]
    return Scoring(
        pool,
        timeout_s=timeout_s,
        limited={part_name(part): part.timeout_s for part in near if part.timeout_s is not None},
        remotes={part_name(part): remote(part) for part in config.rewards if isinstance(part, REMOTE)},
        weights={name: number.weight for name, number in numbers.items()},
        own=own,
        replaced=replaced(config),
        rule=None if rule == Rule() else rule,
    )
