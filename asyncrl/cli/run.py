"""`asyncrl run`: everything of one run on this machine."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asyncrl.cli.errors import FAILED, Failure
from asyncrl.cli.options import age_option, grace_option, print_summary, recipe_of, resume_option, set_option, warn_of

if TYPE_CHECKING:
    from asyncrl.config.devices import Placement
    from asyncrl.config.loading import Loaded
    from asyncrl.config.recipe import Recipe


@click.command()
@click.argument("recipe", required=False)
@resume_option
@age_option
@set_option
@click.option("--dry-run", is_flag=True, help="Check the recipe, print it resolved, start nothing.")
@click.option("--smoke", is_flag=True, help="Two steps with all of its parts; what each took, how long it all takes.")
@grace_option
def run(recipe: str | None, resume: str | None, dry_run: bool, smoke: bool, **options: Any) -> int:
    """Train: starts the store, a learner and a collector, shows how it goes, and ends them all.

    RECIPE is a path or the name of a packaged recipe; left out: tiny-reverse. What this machine lacks of what it needs
    is no error of --dry-run, but is said.
    """
    if smoke and (dry_run or resume is not None):
        raise click.UsageError("--smoke makes a run of its own: leave out --dry-run and --resume")
    from asyncrl.runtime import folder as folders

    previous = folders.find(resume or None) if resume is not None else None
    loaded = recipe_of(recipe, previous, elsewhere=dry_run, **options)
    whole = loaded.recipe
    if smoke:
        from asyncrl.runtime import smoke as shortened

        overrides = [*options.pop("overrides"), *shortened.overrides(whole)]
        loaded = recipe_of(recipe, None, overrides=overrides, **options)
    from asyncrl.runtime import data_report  # after the recipe, whose errors need not wait for it
    from asyncrl.runtime.pinned import pinned
    from asyncrl.runtime.preflight import EMBEDDED, check

    url = None if loaded.recipe.buffer.url == EMBEDDED else loaded.recipe.buffer.url
    if dry_run:
        return _dry_run(loaded, url, resume=previous is not None)
    if previous is None:
        loaded = pinned(loaded)
    plan = asyncio.run(check(loaded.recipe, url=url, resume=previous is not None))
    warn_of(plan)
    found = asyncio.run(data_report.look(loaded.recipe))
    with folders.opened(loaded, previous) as folder:
        click.echo(plan.line())
        for key, one in found.items():
            click.echo(f"{key}: {one.line}")
        data_report.write(found, folder)
        if smoke:
            return _smoke(loaded.recipe, whole, folder, plan.placement)
        code = _supervise(loaded.recipe, folder, plan.placement, resume=previous is not None)
        print_summary(folder)
        return code


def _smoke(recipe: Recipe, whole: Recipe, folder: Path, placement: Placement) -> int:
    """Run the short recipe, and say what worked. Raises Failure: something did not."""
    from asyncrl.runtime.smoke import Short, table

    began = time.time()
    failure: Failure | None = None
    code = 0
    try:
        code = _supervise(recipe, folder, placement, resume=False)
    except Failure as error:
        failure = error
    short = Short.of(folder, began=began)
    for line in table(short.parts):
        click.echo(line)
    if failure is not None or (code == 0 and short.failed):
        raise Failure(f"{short.failed or 'its end'}: {failure or 'it did not come'}", FAILED)
    if code == 0:
        click.echo(short.projected(whole))
    return code


def _dry_run(loaded: Loaded, url: str | None, *, resume: bool) -> int:
    from asyncrl.config.file_checks import missing_files
    from asyncrl.config.resolved import resolved_yaml
    from asyncrl.runtime import data_report
    from asyncrl.runtime.planner import DoesNotFit
    from asyncrl.runtime.preflight import survey

    plan, lacks = asyncio.run(survey(loaded.recipe, url=url, resume=resume))
    found = {} if any(missing_files(loaded.recipe)) else asyncio.run(data_report.look(loaded.recipe))
    click.echo(resolved_yaml(loaded.recipe, names_preset=loaded.names_preset), nl=False)
    elsewhere = "memory: not for this machine; `asyncrl plan --gpus NxSIZE --memory SIZE` says it for another"
    for line in (elsewhere if plan is None else plan.table()).splitlines():
        click.echo(f"# {line}")
    for key, one in found.items():
        click.echo(f"# {key}: {one.line}")
    try:
        if plan is not None:
            warn_of(plan)
    except DoesNotFit as error:
        lacks.append(str(error))
    for lack in lacks:
        click.echo(f"not here: {lack}", err=True)
    return 0


def _supervise(recipe: Recipe, folder: Path, placement: Placement, *, resume: bool) -> int:
    from asyncrl.runtime import signals
    from asyncrl.runtime.supervisor import SHUTDOWN_S, Supervisor

    click.echo(f"run folder {folder}")
    supervisor = Supervisor(recipe, folder, placement=placement, resume=resume)
    code = signals.run(supervisor.run, grace_s=recipe.run.grace_s + SHUTDOWN_S)
    if supervisor.failure:
        raise Failure(supervisor.failure, code)
    return code
