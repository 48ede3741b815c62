"""Reward parts that cannot be meant: refused before a run, with the reason."""

from __future__ import annotations

import re

from asyncrl.config.errors import RecipeError, quoted
from asyncrl.config.recipe import Recipe, SingleTurnTask
from asyncrl.config.rewards import Format, Length, Overlong, Shaping


def check_rewards(recipe: Recipe) -> None:
    """Raise RecipeError for the first reward part, scale or clip of `task` that makes no sense in this recipe."""
    task = recipe.task
    types = [part.type for part in task.rewards]
    if twice := next((name for name in types if types.count(name) > 1), None):
        raise RecipeError(f"task.rewards has {twice} twice; parts are told apart by their type. Keep one of them")
    if isinstance(task, SingleTurnTask) and all(isinstance(part, Shaping) for part in task.rewards):
        said = f"has {', '.join(types)} only: nothing says whether an answer is right" if types else "is []"
        raise RecipeError(f"task.rewards {said}; add {{type: exact}}, or write a task of your own (docs/tasks.md)")
    for n, part in enumerate(task.rewards):
        _check_part(f"task.rewards[{n}]", part, max_tokens=recipe.collector.sampling.max_tokens)
    clip = task.reward_clip
    if clip is not None and clip[0] >= clip[1]:
        raise RecipeError(f"task.reward_clip is {quoted(clip)}; write the lower bound first, such as [-1.0, 1.0]")
    if clip is not None and recipe.objective.advantage == "gdpo":
        raise RecipeError(
            f"task.reward_clip is {quoted(clip)}, but objective.advantage gdpo compares each part by itself and never "
            "looks at their sum, which is what is clipped. Leave it out, or take another advantage"
        )


def _check_part(key: str, part: object, *, max_tokens: int) -> None:
    if isinstance(part, Format):
        try:
            re.compile(part.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise RecipeError(
                f"{key}.pattern is {quoted(part.pattern)}; it is no regular expression of Python: {error}"
            ) from None
    if isinstance(part, Overlong) and part.buffer_tokens >= max_tokens:
        raise RecipeError(
            f"{key}.buffer_tokens is {part.buffer_tokens} with collector.sampling.max_tokens {max_tokens}: every "
            "answer would be penalised. Use less, such as a quarter of max_tokens"
        )
    if isinstance(part, Length) and part.target_tokens > max_tokens:
        raise RecipeError(
            f"{key}.target_tokens is {part.target_tokens}, but no answer is longer than collector.sampling.max_tokens "
            f"{max_tokens}. Use {max_tokens} or less"
        )
