"""`asyncrl learner`: the learner process alone."""

from __future__ import annotations

import asyncio
import json
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
    from asyncrl.config.recipe import Recipe


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

    RECIPE is a path, the name of a packaged recipe, or - to read a resolved one from standard input.
    """
    from asyncrl.config.loading import recipe_from_document
    from asyncrl.runtime import folder as folders

    if rank is not None:
        assert url is not None, "rank 0 gives the URL in the environment"
        assert meeting is not None, "rank 0 gives it"
        return _follow(recipe_from_document(json.load(sys.stdin)), url, rank, meeting)
    if run_dir is not None:  # the parent has checked the recipe, and shows how it goes
        assert url is not None, "`asyncrl run` gives the URL in the environment"
        return _learn(recipe_from_document(json.load(sys.stdin)), url, run_dir, resume=resume is not None, show=False)
    previous = folders.find(resume or None) if resume is not None else None
    loaded = recipe_of(recipe, previous, **options)
    from asyncrl.runtime.preflight import EMBEDDED, check  # after the recipe, whose errors need not wait for it

    url = url or loaded.recipe.buffer.url
    if url == EMBEDDED:
        raise click.UsageError(
            "buffer.url is embedded, a store that only `asyncrl run` starts; "
            "start one with `asyncrl buffer serve` and give --buffer URL"
        )
    plan = asyncio.run(check(loaded.recipe, url=url, resume=previous is not None, collects=False))
    warn_of(plan)
    with folders.opened(loaded, previous) as folder:
        click.echo(plan.line())
        click.echo(f"run folder {folder}")
        return _learn(loaded.recipe, url, folder, resume=previous is not None, show=True)


def _learn(recipe: Recipe, url: str, folder: Path, *, resume: bool, show: bool) -> int:
    from asyncrl.runtime import processes, signals
    from asyncrl.runtime.sinks import closing_s

    async def main(stop: asyncio.Event) -> int:
        shown = asyncio.create_task(processes.show_steps(recipe, folder, resume=resume)) if show else None
        try:
            await processes.learner(recipe, url=url, folder=folder, resume=resume, stop=stop)
        finally:
            if shown is not None:
                shown.cancel()
                await asyncio.wait({shown})
        return 0

    processes.log_to_stderr()
    code = signals.run(main, grace_s=recipe.run.grace_s + closing_s(recipe.telemetry))
    if show:
        print_summary(folder)
    return code


def _follow(recipe: Recipe, url: str, rank: int, meeting: Path) -> int:
    """No handlers of signals: rank 0 takes them for all, and one that is meant for this rank ends it."""
    from asyncrl.runtime import processes

    processes.log_to_stderr()
    asyncio.run(processes.learner_rank(recipe, url=url, rank=rank, meeting=meeting))
    return 0
