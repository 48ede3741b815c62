"""Numbers nobody is asked for, because they follow from the recipe. `--dry-run` prints them marked `# derived`."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.recipe import Recipe
from asyncrl.config.sizes import size_bytes

BYTES_PER_TOKEN = 13
"""token_ids int32, loss_mask uint8, logprobs float32, versions int32."""

ROW_BYTES = 4096
"""Room for a trajectory's other columns: reward parts, spans, times, info."""

PROMPT_TOKENS = 4096
"""Room for a prompt where `model.max_length` does not bound prompt + completion."""

LEAST_GROUP_BYTES = 1 << 20
MOST_SLOTS = 256
"""Requests one engine decodes at once, unless `engine.slots` says otherwise."""


@dataclass(frozen=True, slots=True)
class Derived:
    """trajectories_per_step: groups x members. engine_slots: requests one engine decodes at once. group_bytes: reserved
    with each ticket. max_bytes: `buffer.max_bytes` in bytes. reserved_bytes: of a full window, (k + 1) x B groups."""

    trajectories_per_step: int
    engine_slots: int
    group_bytes: int
    max_bytes: int
    reserved_bytes: int


def derive(recipe: Recipe) -> Derived:
    """All derived numbers of a recipe."""
    buffer, collector = recipe.buffer, recipe.collector
    window = (buffer.max_trajectory_age + 1) * recipe.learner.groups_per_step
    tokens = recipe.model.max_length or PROMPT_TOKENS + collector.sampling.max_tokens
    group_bytes = max(LEAST_GROUP_BYTES, collector.group_size * (tokens * BYTES_PER_TOKEN + ROW_BYTES))
    slots = collector.engine.slots
    if slots is None:  # as many as admission can fill
        slots = min(MOST_SLOTS, -(-window * collector.group_size // collector.engines))
    return Derived(
        trajectories_per_step=recipe.learner.groups_per_step * collector.group_size,
        engine_slots=slots,
        group_bytes=group_bytes,
        max_bytes=size_bytes(buffer.max_bytes),
        reserved_bytes=window * group_bytes,
    )
