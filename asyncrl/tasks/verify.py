"""Ties tasks to the verifier processes, which know of neither: they import a factory by name and call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from asyncrl.config import recipe
from asyncrl.config.rewards import Role, declared, part_name
from asyncrl.config.sizes import size_bytes
from asyncrl.rewards.build import REMOTE, remote
from asyncrl.rewards.pool import VerifierPool
from asyncrl.rewards.scoring import Scoring
from asyncrl.rewards.shaping import Rule
from asyncrl.tasks.mixture import weights_of
from asyncrl.tasks.scorer import replaced


def scoring_of(config: recipe.SingleTask, collector: recipe.Collector, *, seed: int, max_tokens: int) -> Scoring:
    """What scores by a task, not yet started. `score` takes a Row and an Answer. max_tokens: that one answer may
    have."""
    return _scoring(_pool(config, collector, seed=seed, max_tokens=max_tokens), config, collector.score_timeout_s)


def scorings_of(
    config: recipe.MixtureTask, collector: recipe.Collector, *, seed: int, max_tokens: int
) -> dict[str, Scoring]:
    """The same for each task of a mixture, by name. They share the verifier processes: the first that is started
    starts them, and the first that is closed ends them. `score` takes a row of the mixture."""
    pool = _pool(config, collector, seed=seed, max_tokens=max_tokens)
    return {
        name: _scoring(pool, one, collector.score_timeout_s, own=partial(weights_of, name))
        for name, one in recipe.mixed_tasks(config).items()
    }


def _pool(config: recipe.Task, collector: recipe.Collector, *, seed: int, max_tokens: int) -> VerifierPool:
    limit = collector.score_memory_limit
    return VerifierPool(
        # Named, not imported: it is the worker that builds it.
        "asyncrl.tasks.scorer:scorer",
        {
            "task": recipe.to_builtins(config),
            "seed": seed,
            "max_tokens": max_tokens,
            "max_turns": collector.max_turns,
        },
        workers=collector.score_workers,
        memory_bytes=None if limit is None else size_bytes(limit),
    )


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
