"""Numbers nobody is asked for, because they follow from the recipe. `--dry-run` prints them marked `# derived`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from asyncrl.config.packages import VerifiersTask
from asyncrl.config.recipe import AgentTask, CustomTask, Engine, Recipe, VllmEngine, tasks_by_key
from asyncrl.config.sizes import size_bytes
from asyncrl.schema import max_group_bytes

MOST_SLOTS = 256
"""Requests a collector decodes at once, over all its engines, unless the recipe says otherwise: beyond it a decode step
only gets slower."""

GROUPS_PER_SLOT = 4
"""Groups in work for each whose members have slots. New ones start while slots are free, and a group whose members wait
for a tool or a score has none: with so many the engines stay busy where three quarters of an episode are such waits. If
they all want to go on at once, each waits for three others."""

LOOKAHEAD = 1.5
"""x groups_per_step oldest tickets that a step chooses from: the learner need not wait for the slowest of them."""

IN_ORDER = 1.0
"""The lookahead under which a step trains the oldest tickets, whichever come first: their batches are the same in every
run of the recipe."""

MOST_ENDS = 16
"""Tokens that may end a model's answer; models have one to three. Before `min_tokens` the record says of each token
that it was none of them."""


@dataclass(frozen=True, slots=True)
class Derived:
    """trajectories_per_step: groups x members. groups_per_update: "5", or "5 or 6" of 16 by 3. engine_slots: requests
    one engine decodes at once. most_groups: in work at once in a collector. max_bytes: `buffer.max_bytes` in bytes.
    lookahead: see the function of that name. group_bytes: reserved with each ticket; without `model.max_length`, which
    then only the model knows, the least it can be. reserved_bytes: of a full window, (k + 1) x B groups.
    fresh_per_step: see the function of that name."""

    trajectories_per_step: int
    groups_per_update: str
    engine_slots: int
    most_groups: int
    lookahead: float
    max_bytes: int
    group_bytes: int
    reserved_bytes: int
    fresh_per_step: int


def given_slots(engine: Engine) -> int | None:
    """What the recipe says of the requests an engine decodes at once, by the name that its type has for it."""
    return engine.max_num_seqs if isinstance(engine, VllmEngine) else engine.slots


def derive(recipe: Recipe) -> Derived:
    """All derived numbers of a recipe."""
    buffer, collector = recipe.buffer, recipe.collector
    window = (buffer.max_trajectory_age + 1) * recipe.learner.groups_per_step
    reserved = group_bytes(recipe, max_length=recipe.model.max_length or collector.sampling.max_tokens + 1)
    slots = given_slots(collector.engine)
    if slots is None and recipe.run.deterministic and buffer.max_trajectory_age == 0:
        slots = 1  # which requests share a forward depends on timing, and rounds each a little differently
    elif slots is None:  # as many as admission can fill
        slots = math.ceil(min(MOST_SLOTS, window * collector.group_size) / collector.engines)
    fewest, more = divmod(recipe.learner.groups_per_step, recipe.learner.updates_per_step)
    return Derived(
        trajectories_per_step=recipe.learner.groups_per_step * collector.group_size,
        groups_per_update=f"{fewest} or {fewest + 1}" if more else str(fewest),
        engine_slots=slots,
        most_groups=GROUPS_PER_SLOT * math.ceil(collector.engines * slots / collector.group_size)
        if collector.max_concurrent_groups == "auto"
        else collector.max_concurrent_groups,
        lookahead=lookahead(recipe),
        max_bytes=size_bytes(buffer.max_bytes),
        group_bytes=reserved,
        reserved_bytes=window * reserved,
        fresh_per_step=fresh_per_step(recipe),
    )


def lookahead(recipe: Recipe) -> float:
    """`buffer.lookahead`, unless the recipe leaves it open: strictly in order where it is to be deterministic."""
    if recipe.buffer.lookahead is not None:
        return recipe.buffer.lookahead
    return IN_ORDER if recipe.run.deterministic else LOOKAHEAD


def group_bytes(recipe: Recipe, *, max_length: int) -> int:
    """What the buffer reserves with each ticket. max_length: tokens of a row. Only what is played may have episodes of
    several turns, whose history may be rewritten before each: agents, environments, a task's own class."""
    sampling = recipe.collector.sampling
    played = any(
        isinstance(task, AgentTask | CustomTask) or (isinstance(task, VerifiersTask) and task.env is not None)
        for task in tasks_by_key(recipe.task).values()
    )
    ends = MOST_ENDS if sampling.min_tokens else 0
    return max_group_bytes(
        recipe.collector.group_size,
        max_length,
        segments=recipe.collector.max_turns if played else 1,
        support=ends if sampling.top_k == -1 else sampling.top_k,
    )


def fresh_per_step(recipe: Recipe) -> int:
    """Groups of a step that `buffer.min_fresh` asks for; 0 where each group is trained once, and all are."""
    if recipe.buffer.max_uses == 1:
        return 0
    return math.ceil(round(recipe.buffer.min_fresh * recipe.learner.groups_per_step, 6))  # 0.07 x 100 is 7.000...01
