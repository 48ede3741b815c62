"""What the buffer shall enforce, from the recipe."""

from __future__ import annotations

from asyncrl.buffers.limits import Limits
from asyncrl.config.derived import fresh_per_step, group_bytes, lookahead
from asyncrl.config.recipe import Recipe
from asyncrl.config.sizes import size_bytes


def limits_of(recipe: Recipe, *, max_length: int) -> Limits:
    """max_length: tokens of the longest sequence the model takes. Raises ValueError where the recipe contradicts itself
    (see `Limits`)."""
    return Limits(
        max_age=recipe.buffer.max_trajectory_age,
        groups_per_step=recipe.learner.groups_per_step,
        max_steps=recipe.run.max_steps,
        over_age=recipe.buffer.over_age,
        lookahead=lookahead(recipe),
        publish_every=recipe.weights.publish_every,
        group_bytes=group_bytes(recipe, max_length=max_length),
        max_bytes=size_bytes(recipe.buffer.max_bytes),
        max_uses=recipe.buffer.max_uses,
        fresh_per_step=fresh_per_step(recipe),
        group_size=recipe.collector.group_size,
        ticket_progress_s=recipe.collector.group_timeout_s,
        no_progress_s=recipe.run.no_progress_s,
    )
