"""`asyncrl run`: everything of one run on this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asyncrl.cli.errors import Failure
from asyncrl.cli.options import age_option, grace_option, print_summary, recipe_of, resume_option, set_option, warn_of

if TYPE_CHECKING:
    from asyncrl.config.loading import Loaded
    from asyncrl.config.recipe import Recipe


@click.command()
@click.argument("recipe", required=False)
@resume_option
@age_option
@set_option
@click.option("--dry-run", is_flag=True, help="Check the recipe, print it resolved, start nothing.")
@grace_option
def run(recipe: str | None, resume: str | None, dry_run: bool, **options: Any) -> int:
    """Train: starts the store, a learner and a collector, shows how it goes, and ends them all.

    RECIPE is a path or the name of a packaged recipe; left out: tiny-reverse. What this machine lacks of what it needs
    is no error of --dry-run, but is said.
    """
    from asyncrl.runtime import folder as folders

    previous = folders.find(resume or None) if resume is not None else None
    loaded = recipe_of(recipe, previous, elsewhere=dry_run, **options)
    from asyncrl.runtime.preflight import EMBEDDED, check  # after the recipe, whose errors need not wait for it

    url = None if loaded.recipe.buffer.url == EMBEDDED else loaded.recipe.buffer.url
    if dry_run:
        return _dry_run(loaded, url, resume=previous is not None)
    plan = asyncio.run(check(loaded.recipe, url=url, resume=previous is not None))
    warn_of(plan)
    with folders.opened(loaded, previous) as folder:
        click.echo(plan.line())
        return _supervise(loaded.recipe, folder, resume=previous is not None)


def _dry_run(loaded: Loaded, url: str | None, *, resume: bool) -> int:
    from asyncrl.config.resolved import resolved_yaml
    from asyncrl.runtime.planner import DoesNotFit
    from asyncrl.runtime.preflight import survey

    plan, lacks = asyncio.run(survey(loaded.recipe, url=url, resume=resume))
    click.echo(resolved_yaml(loaded.recipe, names_preset=loaded.names_preset), nl=False)
    for line in ("" if plan is None else plan.table()).splitlines():
        click.echo(f"# {line}")
    try:
        if plan is not None:
            warn_of(plan)
    except DoesNotFit as error:
        lacks.append(str(error))
    for lack in lacks:
        click.echo(f"not here: {lack}", err=True)
    return 0


def _supervise(recipe: Recipe, folder: Path, *, resume: bool) -> int:
    from asyncrl.runtime import signals
    from asyncrl.runtime.supervisor import SHUTDOWN_S, Supervisor

    click.echo(f"run folder {folder}")
    supervisor = Supervisor(recipe, folder, resume=resume)
    code = signals.run(supervisor.run, grace_s=recipe.run.grace_s + SHUTDOWN_S)
    if supervisor.failure:
        raise Failure(supervisor.failure, code)
    print_summary(folder)
    return code
