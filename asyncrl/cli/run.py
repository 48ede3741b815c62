"""`asyncrl run`: everything of one run on this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asyncrl.cli.errors import Failure
from asyncrl.cli.options import age_option, grace_option, print_summary, recipe_of, resume_option, set_option, warn_of

if TYPE_CHECKING:
    from asyncrl.config.recipe import Recipe


@click.command()
@click.argument("recipe", required=False)
@resume_option
@age_option
@set_option
@click.option("--dry-run", is_flag=True, help="Check everything, print the resolved recipe, start nothing.")
@grace_option
def run(recipe: str | None, resume: str | None, dry_run: bool, **options: Any) -> int:
    """Train: starts the store, a learner and a collector, shows how it goes, and ends them all.

    RECIPE is a path or the name of a packaged recipe; left out: tiny-reverse.
    """
    from asyncrl.runtime import folder as folders

    previous = folders.find(resume or None) if resume is not None else None
    loaded = recipe_of(recipe, previous, **options)
    from asyncrl.runtime.preflight import EMBEDDED, check  # after the recipe, whose errors need not wait for it

    url = loaded.recipe.buffer.url
    plan = asyncio.run(check(loaded.recipe, url=None if url == EMBEDDED else url, resume=previous is not None))
    if dry_run:
        from asyncrl.config.resolved import resolved_yaml

        click.echo(resolved_yaml(loaded.recipe, names_preset=loaded.names_preset), nl=False)
        for line in plan.table().splitlines():
            click.echo(f"# {line}")
        warn_of(plan)
        return 0
    warn_of(plan)
    with folders.opened(loaded, previous) as folder:
        click.echo(plan.line())
        return _supervise(loaded.recipe, folder, resume=previous is not None)


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
