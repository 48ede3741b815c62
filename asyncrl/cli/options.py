"""Options that several commands share, and the recipe they lead to."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from asyncrl.config.loading import Loaded
    from asyncrl.runtime.planner import Plan

F = TypeVar("F", bound=Callable[..., Any])


def set_option(command: F) -> F:
    """`--set section.key=value`, as often as wanted."""
    return click.option(
        "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a recipe key, e.g. run.max_steps=20."
    )(command)


def resume_option(command: F) -> F:
    """`--resume [RUN]`: None = not given, "" = the newest."""
    return click.option(
        "--resume",
        is_flag=False,
        flag_value="",
        default=None,
        metavar="[RUN]",
        help="Continue RUN (a folder or a name; left out: the newest) from its newest valid checkpoint.",
    )(command)


def age_option(command: F) -> F:
    """`--max-trajectory-age K`."""
    return click.option(
        "--max-trajectory-age",
        type=int,
        metavar="K",
        help="No token older than K versions is trained; 0 = synchronous. Sets buffer.max_trajectory_age.",
    )(command)


def grace_option(command: F) -> F:
    """`--grace SECONDS`."""
    return click.option(
        "--grace",
        type=float,
        metavar="SECONDS",
        help="What the first SIGINT or SIGTERM leaves for a checkpoint. Sets run.grace_s.",
    )(command)


def buffer_option(command: F) -> F:
    """`--buffer URL`."""
    return click.option(
        "--buffer",
        "url",
        envvar="ASYNCRL_BUFFER",
        show_envvar=True,
        metavar="URL",
        help="The store, as `asyncrl buffer serve` prints it.",
    )(command)


def recipe_of(
    recipe: str | None,
    resumed: Path | None,
    *,
    overrides: Sequence[str] = (),
    max_trajectory_age: int | None = None,
    grace: float | None = None,
    elsewhere: bool = False,
) -> Loaded:
    """The recipe the options lead to; that of the folder `resumed`, if one is given. elsewhere: it is not for this
    machine, which need not have the files that it names."""
    from asyncrl.config.loading import load_recipe
    from asyncrl.config.resumable import MAY_CHANGE

    if grace is not None:
        overrides = [*overrides, f"run.grace_s={grace}"]
    if resumed is not None:
        if max_trajectory_age is not None:
            raise click.UsageError("--max-trajectory-age: a resumed run keeps its own")
        recipe = own_recipe(resumed, recipe, overrides, MAY_CHANGE)
    flags = {"max_trajectory_age": max_trajectory_age}
    return load_recipe(recipe, overrides=overrides, flags=flags, elsewhere=elsewhere)


def own_recipe(resumed: Path, recipe: str | None, overrides: Sequence[str], resumable: Collection[str]) -> str:
    """The recipe that the folder `resumed` keeps; only keys in `resumable`, or below one of them, may be set anew."""
    from asyncrl.config.errors import quoted
    from asyncrl.config.merge import flatten
    from asyncrl.config.overrides import override_document
    from asyncrl.config.resumable import refused
    from asyncrl.config.yaml_text import parse

    if recipe is not None:
        raise click.UsageError(f"--resume takes the recipe from {resumed}; leave out {recipe!r}")
    path = resumed / "recipe.yaml"
    kept = flatten(parse(path.read_text(encoding="utf-8")))
    for key, before, given in refused(kept, flatten(override_document(overrides)), resumable):
        raise click.UsageError(
            f"--set {key}: a resumed run keeps its own, {quoted(before)}, and does not take {quoted(given)}; "
            f"only {', '.join(resumable)} may change"
        )
    return str(path)


def print_summary(folder: Path) -> None:
    """The run's eleven lines, if it came so far as to write them."""
    from asyncrl.telemetry.summary import render

    summary = folder / "summary.json"
    if summary.exists():
        render(json.loads(summary.read_bytes()), terminal=sys.stdout.isatty(), file=sys.stdout)


def warn_of(plan: Plan, *, by_estimate: bool = False) -> None:
    """Say on stderr where memory is close. Raises DoesNotFit, as `Plan.check`."""
    if warning := plan.check(by_estimate=by_estimate):
        click.echo(warning, err=True)
