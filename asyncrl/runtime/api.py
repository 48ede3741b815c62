"""`asyncrl.run` and `asyncrl.open_run`: from Python what `asyncrl run` does from a shell.

    run = asyncrl.run("mine.yaml", max_trajectory_age=1, learner={"learning_rate": 1e-4})
    run.metrics["reward/mean"], run.summary["success_after"], run.checkpoint

The same checks, the same processes, the same folder.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

from asyncrl.config.devices import Placement
from asyncrl.config.loading import load_recipe
from asyncrl.runtime import data_report, own_loop
from asyncrl.runtime import folder as folders
from asyncrl.runtime.finished import Run
from asyncrl.runtime.pinned import pinned
from asyncrl.runtime.preflight import EMBEDDED, check
from asyncrl.runtime.processes import RunFailed
from asyncrl.runtime.supervisor import SHUTDOWN_S, Supervisor

log = logging.getLogger(__name__)

__all__ = ["Run", "RunFailed", "open_run", "run"]


def run(recipe: str | os.PathLike[str] | None = None, *, max_trajectory_age: int | None = None, **sections: Any) -> Run:
    """Train to the end and return the run. Prints a line per step, to `sys.stdout` as it is when called.

    recipe: a path or the name of a packaged recipe; left out: tiny-reverse. sections: what differs from it, a mapping
    for each section, as in `learner={"learning_rate": 1e-4}, task={"digits": (3, 4)}`; `**{"learner.learning_rate":
    1e-4}` is the same. max_trajectory_age: as the flag, over both.

    Works in a script, in a notebook (a running event loop does not matter) and in any thread. KeyboardInterrupt stops
    the run with a checkpoint within `run.grace_s` seconds and is raised then; a second one ends it at once.

    Raises what a recipe, its data, task, model, store or folder cause before anything is started (RecipeError,
    DataError, TaskError, ModelError, BuiltinModelError, BufferError, RunFolderError, DoesNotFit: one to three lines,
    with the fix), and RunFailed if the run itself fails.
    """
    source = None if recipe is None else os.fspath(recipe)
    loaded = pinned(load_recipe(source, sections=sections, flags={"max_trajectory_age": max_trajectory_age}))
    settings = loaded.recipe

    async def checked(_stop: asyncio.Event) -> tuple[Placement, dict[str, data_report.Found]]:
        url = settings.buffer.url
        plan = await check(settings, url=None if url == EMBEDDED else url, resume=False)
        if warning := plan.check():
            log.warning(warning)
        return plan.placement, await data_report.look(settings)

    placement, found = own_loop.run(checked, grace_s=0.0)
    with folders.opened(loaded) as folder:
        data_report.write(found, folder)
        supervisor = Supervisor(settings, folder, placement=placement, resume=False)
        own_loop.run(supervisor.run, grace_s=settings.run.grace_s + SHUTDOWN_S)
    if supervisor.failure:
        raise RunFailed(supervisor.failure)
    return Run(folder)


def open_run(run: str | os.PathLike[str] | None = None) -> Run:
    """A run that was made before, or that goes on: its folder, its name (the newest below runs/), or left out, the
    newest of all. Raises RunFolderError if there is none."""
    return Run(folders.find(None if run is None else os.fspath(run)))
