"""`asyncrl plan`: what a run takes of a machine that need not be this one."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import click

from asyncrl.cli.options import age_option, recipe_of, set_option, warn_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncrl.config.recipe import Recipe
    from asyncrl.learners.shapes import Shapes
    from asyncrl.runtime.room import Machine

SIDES = {"run": "learner and collector", "learner": "learner", "collector": "collector"}


def gpus(ctx: click.Context, param: click.Parameter, text: str | None) -> list[int] | None:
    """Bytes of each GPU of `8x80GiB`, of `80GiB`, or of none: `0`."""
    from asyncrl.config.sizes import size_bytes

    if text is None or text == "0":
        return None if text is None else []
    count, size = found.groups() if (found := re.fullmatch(r"(\d+)x(.+)", text)) else ("1", text)
    try:
        return int(count) * [size_bytes(size)]
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a number of GPUs and their size, as 8x80GiB: {error}") from None


def size(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    """Bytes of `1TiB`."""
    from asyncrl.config.sizes import size_bytes

    try:
        return None if text is None else size_bytes(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: {error}") from None


@click.command()
@click.argument("recipe", required=False)
@click.option("--gpus", callback=gpus, metavar="NxSIZE", help="Of the machine: 8x80GiB, 24GiB, or 0.")
@click.option("--memory", callback=size, metavar="SIZE", help="Of the machine: 1TiB.")
@click.option("--of", "side", type=click.Choice(list(SIDES)), help="What runs on it; left out: as the recipe has it.")
@age_option
@set_option
def plan(
    recipe: str | None,
    gpus: list[int] | None,
    memory: int | None,
    side: str | None,
    max_trajectory_age: int | None,
    overrides: tuple[str, ...],
) -> int:
    """Whether a run fits into the memory of a machine, part by part; exit code 2 if it does not.

    RECIPE is a path or the name of a packaged recipe; left out: tiny-reverse. Without --gpus and --memory the machine
    is this one. Of a recipe whose store is embedded all is on one machine; of any other, learner and collector are
    planned on one each.
    """
    if gpus and memory is None:
        raise click.UsageError("--gpus is of another machine: give its memory too, as in --memory 1TiB")
    loaded = recipe_of(recipe, None, overrides=overrides, max_trajectory_age=max_trajectory_age, elsewhere=True)
    from asyncrl.learners.cache import BuiltinModelError
    from asyncrl.learners.shapes import shapes_of
    from asyncrl.runtime import models, room
    from asyncrl.runtime.reward_model_memory import reward_model_shapes

    settings = loaded.recipe
    try:
        folder = models.check(settings, fetch=False)
    except (models.NotHere, BuiltinModelError):  # nor need it be: it may be known without
        folder = None
    shapes = shapes_of(settings.model.path, folder)
    there = asyncio.run(room.machine()) if memory is None else room.other(memory, gpus or [])
    sides = [side] if side else ["run"] if settings.buffer.url == "embedded" else ["learner", "collector"]
    scoring = reward_model_shapes(settings)
    for one in sides:
        _plan_side(settings, shapes, scoring, there, one)
    return 0


def _plan_side(
    recipe: Recipe, shapes: Shapes | str, scoring: Mapping[str, Shapes | str], there: Machine, side: str
) -> None:
    """Print it. Raises DoesNotFit."""
    from asyncrl.runtime import planner

    ranks = 0 if side == "collector" else recipe.learner.ranks
    planned = planner.plan(recipe, shapes, there, collects=side != "learner", neighbours=ranks, scoring=scoring)
    click.echo(f"{SIDES[side]}, on a machine with {there}")
    click.echo(planned.table(), nl=False)
    warn_of(planned, by_estimate=True)
