"""`asyncrl learner`: the learner process alone."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asyncrl.cli.options import (
    age_option,
    buffer_option,
    grace_option,
    print_summary,
    recipe_of,
    resume_option,
    set_option,
    warn_of,
)

if TYPE_CHECKING:
    from asyncrl.config.loading import Loaded
    from asyncrl.config.recipe import Recipe
    from asyncrl.runtime.launch import Launch

ECHO_S = 5.0
"""torchrun passes on the signals that it gets, and a scheduler has often sent them to all processes itself."""


@click.command()
@click.argument("recipe", required=False)
@buffer_option
@resume_option
@age_option
@set_option
@grace_option
@click.option("--run-dir", type=click.Path(path_type=Path), hidden=True, help="Made and locked by `asyncrl run`.")
@click.option("--rank", type=int, hidden=True, help="Started by rank 0, which waits at --meeting.")
@click.option("--meeting", type=click.Path(path_type=Path), hidden=True)
def learner(
    recipe: str | None,
    url: str | None,
    resume: str | None,
    run_dir: Path | None,
    rank: int | None,
    meeting: Path | None,
    **options: Any,
) -> int:
    """Create the run in a store and train it; collectors join with `asyncrl collector`.

    RECIPE is a path, the name of a packaged recipe, or - to read a resolved one from standard input. Started by
    torchrun, also on several hosts, each process is one of the learner's ranks.
    """
    from asyncrl.config.loading import recipe_from_document
    from asyncrl.runtime import folder as folders
    from asyncrl.runtime.launch import Launch

    if rank is not None:
        assert url is not None, "rank 0 gives the URL in the environment"
        assert meeting is not None, "rank 0 gives it"
        return _follow(recipe_from_document(json.load(sys.stdin)), url, rank, meeting)
    if run_dir is not None:  # the parent has checked the recipe, and shows how it goes
        assert url is not None, "`asyncrl run` gives the URL in the environment"
        return _learn(recipe_from_document(json.load(sys.stdin)), url, run_dir, resume=resume is not None, show=False)
    previous = folders.find(resume or None) if resume is not None else None
    loaded = recipe_of(recipe, previous, **options)
    url = url or loaded.recipe.buffer.url
    launch = Launch.of(os.environ)
    if launch is not None:
        loaded, previous = _launched(launch, loaded, recipe, previous, options)
    from asyncrl.runtime import data_report  # after the recipe, whose errors need not wait for it
    from asyncrl.runtime.pinned import pinned
    from asyncrl.runtime.preflight import EMBEDDED, check

    if url == EMBEDDED:
        raise click.UsageError(
            "buffer.url is embedded, a store that only `asyncrl run` starts; "
            "start one with `asyncrl buffer serve` and give --buffer URL"
        )
    if launch is not None and launch.rank > 0:
        return _launched_rank(loaded.recipe, url, launch)
    if previous is None:
        loaded = pinned(loaded)
    neighbours = None if launch is None else launch.local_size
    checks = check(loaded.recipe, url=url, resume=previous is not None, collects=False, neighbours=neighbours)
    plan = asyncio.run(checks)
    warn_of(plan)
    found = asyncio.run(data_report.look(loaded.recipe))
    with folders.opened(loaded, previous) as folder:
        click.echo(plan.line())
        for key, one in found.items():
            click.echo(f"{key}: {one.line}")
        data_report.write(found, folder)
        click.echo(f"run folder {folder}")
        return _learn(loaded.recipe, url, folder, resume=previous is not None, show=True, launch=launch)


def _launched(
    launch: Launch, loaded: Loaded, recipe: str | None, previous: Path | None, options: dict[str, Any]
) -> tuple[Loaded, Path | None]:
    """The recipe of a rank that torchrun started, and the folder of the run that it goes on with. Ranks that torchrun
    starts again go on with the run that those before them have begun, whatever the command says."""
    from asyncrl.runtime.launched import earlier_folder

    if launch.rank == 0 and (earlier := earlier_folder(launch)) is not None:
        return recipe_of(None, earlier, overrides=[f"learner.ranks={launch.size}"], grace=options["grace"]), earlier
    overrides = options["overrides"]
    asked = previous is None or any(text.startswith("learner.ranks=") for text in overrides)
    more = launch.overrides(loaded.recipe) if asked else [f"learner.ranks={launch.size}"]
    return recipe_of(recipe, previous, **{**options, "overrides": [*overrides, *more]}), previous


def _launched_rank(recipe: Recipe, url: str, launch: Launch) -> int:
    from asyncrl.runtime import processes, signals

    async def main(stop: asyncio.Event) -> int:
        await processes.launched_rank(recipe, url=url, launch=launch, stop=stop)
        return 0

    processes.log_to_stderr()
    return signals.run(main, grace_s=recipe.run.grace_s, echo_s=ECHO_S)


def _learn(recipe: Recipe, url: str, folder: Path, *, resume: bool, show: bool, launch: Launch | None = None) -> int:
    from asyncrl.runtime import processes, signals
    from asyncrl.runtime.sinks import closing_s

    async def main(stop: asyncio.Event) -> int:
        shown = asyncio.create_task(processes.show_steps(recipe, folder, resume=resume)) if show else None
        try:
            await processes.learner(recipe, url=url, folder=folder, resume=resume, stop=stop, launch=launch)
        finally:
            if shown is not None:
                shown.cancel()
                await asyncio.wait({shown})
        return 0

    processes.log_to_stderr()
    grace_s = recipe.run.grace_s + closing_s(recipe.telemetry)
    code = signals.run(main, grace_s=grace_s, echo_s=0.0 if launch is None else ECHO_S)
    if show:
        print_summary(folder)
    return code


def _follow(recipe: Recipe, url: str, rank: int, meeting: Path) -> int:
    """No handlers of signals: rank 0 takes them for all, and one that is meant for this rank ends it."""
    from asyncrl.runtime import processes

    processes.log_to_stderr()
    asyncio.run(processes.learner_rank(recipe, url=url, rank=rank, meeting=meeting))
    return 0
