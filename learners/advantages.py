"""How much better than its group a completion was. Pure NumPy, float64: rewards that differ by less than float32 can
tell must not turn into noise divided by a tiny spread."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.recipe import MixtureTask, Recipe, SingleTask, Task, mixed_tasks
from asyncrl.config.rewards import declared
from asyncrl.learners.batch import first_of_each
from asyncrl.schema import Packed

Kind = Literal["group-mean-std", "group-mean", "leave-one-out"]

# Added to the spread, as in the GRPO implementation of TRL: groups that hardly vary are not blown up to unit variance.
EPSILON = 1e-4

# Of the larger number: a few units in the last place of a float32.
FLOAT32_NOISE = 1e-6


@dataclass(frozen=True, slots=True)
class Advantages:
    """values: float64 [rows], 0 for unscored rows. The counts are of groups: `alone` has one scored member, `unscored`
    none, and `equal` several with the same reward; none of the three teaches anything."""

    values: NDArray[np.float64]
    alone: int
    unscored: int
    equal: int


def advantages(rewards: NDArray[np.float64], groups: NDArray[np.int64], kind: Kind) -> Advantages:
    """Advantage of each row against the scored members of its group. rewards [rows], NaN = unscored; groups [rows].

    With r_1..r_n the scored rewards of a group, m their mean and s their standard deviation:

    - group-mean-std: (r_i - m) / (s + 1e-4), s over n - 1 (GRPO, arXiv 2402.03300; the n - 1 is TRL's)
    - group-mean: r_i - m (Dr. GRPO, arXiv 2503.20783: no division, which favours very easy and very hard prompts)
    - leave-one-out: r_i - mean of the others = (r_i - m) n / (n - 1) (RLOO, arXiv 2402.14740: unbiased)

    Equal rewards give exactly 0, and so does a group with a single scored member.

    >>> advantages(np.array([1.0, 0.0, np.nan, 0.5]), np.array([0, 0, 0, 1]), "leave-one-out").values.tolist()
    [1.0, -1.0, 0.0, 0.0]
    """
    values = np.zeros(len(rewards), dtype=np.float64)
    scored = ~np.isnan(rewards)
    alone = unscored = equal = 0
    for group in np.unique(groups):
        members = np.flatnonzero((groups == group) & scored)
        r = rewards[members].astype(np.float64)
        n = len(r)
        if n < 2:
            alone += n == 1
            unscored += n == 0
        elif r.min() == r.max():  # tested, since the mean of equal numbers may be off by a rounding
            equal += 1
        elif kind == "group-mean-std":
            values[members] = (r - r.mean()) / (r.std(ddof=1) + EPSILON)
        elif kind == "group-mean":
            values[members] = r - r.mean()
        else:
            values[members] = (r - r.mean()) * n / (n - 1)
    return Advantages(values, alone=alone, unscored=unscored, equal=equal)


def compared(packed: Packed, recipe: Recipe) -> Advantages:
    """Advantage of each row as `objective.advantage` has it, as far as its own group tells; `scaled` adds what the
    whole step does. What is compared are members, each once: all rows of one have its advantage. Beside the three kinds
    of `advantages`:

    - group-mean-batch-std, leave-one-out-batch-std: with the baseline of `group-mean` or `leave-one-out`
    - gdpo: each reward part normalised in its group as by `group-mean-std`, times its weight, and added up (GDPO, arXiv
      2601.05242): parts that differ count, also where their sum does not
    - raw: the reward, against nothing

    Raises ValueError where the parts do not add up to the reward, so that gdpo would weigh them differently than it.
    """
    begins = first_of_each(packed.answers)
    found = _of_members(packed, begins, recipe)
    return replace(found, values=found.values[packed.answers])


def _of_members(packed: Packed, begins: NDArray[np.bool_], recipe: Recipe) -> Advantages:
    """`compared`, of each member. begins bool [rows]: the first of each one's."""
    kind, rewards, groups = recipe.objective.advantage, packed.rewards[begins], packed.groups[begins]
    if kind == "raw":
        return replace(advantages(rewards, groups, "group-mean"), values=np.where(np.isnan(rewards), 0.0, rewards))
    if kind == "gdpo":
        parts = packed.table.column("reward_parts").filter(begins).to_pylist()
        tasks = packed.table.column("task").filter(begins).to_pylist()
        return _gdpo(rewards, groups, parts, [_task_of(recipe.task, name) for name in tasks])
    within: dict[str | None, Kind] = {
        "group-mean-std": "group-mean-std",
        "group-mean-batch-std": "group-mean",
        "group-mean": "group-mean",
        "leave-one-out": "leave-one-out",
        "leave-one-out-batch-std": "leave-one-out",
    }
    return advantages(rewards, groups, within[kind])


def _task_of(task: Task, name: str) -> SingleTask:
    """The task of a row; `name`: as its record has it."""
    return mixed_tasks(task)[name] if isinstance(task, MixtureTask) else task


def _gdpo(
    rewards: NDArray[np.float64],
    groups: NDArray[np.int64],
    told: Sequence[Sequence[tuple[str, float | None]]],
    tasks: Sequence[SingleTask],
) -> Advantages:
    """told [members]: the parts of each. tasks [members]: says what they weigh; of one without weight, 1."""
    parts: dict[str, NDArray[np.float64]] = {}
    weights: dict[str, NDArray[np.float64]] = {}
    summed = np.zeros(len(rewards))
    declared_by = {id(task): declared(task.rewards) for task in tasks}
    for member, (found, task) in enumerate(zip(told, tasks, strict=True)):
        numbers = declared_by[id(task)]
        for name, value in found:
            part = parts.setdefault(name, np.full(len(rewards), np.nan))
            part[member] = np.nan if value is None or np.isnan(rewards[member]) else value
            weight = weights.setdefault(name, np.ones(len(rewards)))
            weight[member] = numbers[name].weight if name in numbers else 1.0
            summed[member] += task.reward_scale * weight[member] * part[member]
    scored = ~np.isnan(rewards)
    if not np.allclose(summed[scored], rewards[scored], rtol=1e-6, atol=1e-9):
        raise ValueError(
            f"objective.advantage is gdpo, but the parts {', '.join(sorted(parts))} do not add up to the reward: it "
            "knows no part_weights of a task's own class. Let score return parts that are multiplied already"
        )
    values = np.zeros(len(rewards))
    for name, part in parts.items():
        values += weights[name] * advantages(_leveled(part, groups), groups, "group-mean-std").values
    result = advantages(rewards, groups, "group-mean")
    flat = len(np.unique(groups)) - len(np.unique(groups[values != 0]))
    return replace(result, values=values, equal=flat - result.alone - result.unscored)


def _leveled(part: NDArray[np.float64], groups: NDArray[np.int64]) -> NDArray[np.float64]:
    """The part with the noise of float32 taken out of groups that differ by nothing else: two divisions by a spread, of
    a group and of the step, would make a signal of it."""
    part = part.copy()
    for group in np.unique(groups):
        members = np.flatnonzero((groups == group) & ~np.isnan(part))
        own = part[members]
        if len(own) and np.ptp(own) <= FLOAT32_NOISE * np.abs(own).max():
            part[members] = own[0]
    return part


def scaled(
    rewards: NDArray[np.float64],
    answers: NDArray[np.int64],
    values: NDArray[np.float64],
    kind: str | None,
    *,
    total: Callable[[Sequence[float]], list[float]],
) -> NDArray[np.float64]:
    """`values` [rows] of `compared`, divided by a spread over the whole step where `kind` has one: of the rewards
    (...-batch-std, arXiv 2508.08221), or of the values (gdpo; their mean is 0 already). As in a group: over n - 1, and
    1e-4 is added.

    rewards [rows], NaN = unscored, and answers [rows], ascending: of one rank, as `values`. Each answer counts once.
    total: sums over ranks; each of them must call this.
    """
    if kind not in ("group-mean-batch-std", "leave-one-out-batch-std", "gdpo"):
        return values
    measured = (values if kind == "gdpo" else rewards)[first_of_each(answers) & ~np.isnan(rewards)]
    n, whole = total([len(measured), float(measured.sum())])
    (squares,) = total([float(((measured - whole / max(1.0, n)) ** 2).sum())])
    return values / (math.sqrt(squares / max(1.0, n - 1)) + EPSILON)
