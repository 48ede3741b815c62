"""Everything a person can get wrong, checked before any process starts. Loads no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from asyncrl.buffers.base import BufferError
from asyncrl.buffers.store import Store, open_store
from asyncrl.config.errors import RecipeError
from asyncrl.config.file_checks import missing_files
from asyncrl.config.identity import identity_differences
from asyncrl.config.recipe import Recipe, to_builtins
from asyncrl.learners.cache import BuiltinModelError
from asyncrl.runtime import compiler, engine_package, models, planner, sinks
from asyncrl.runtime.planner import Plan
from asyncrl.runtime.task_check import check_apart, others_code
from asyncrl.tasks.base import NotInstalled
from asyncrl.tasks.build import build_task
from asyncrl.tasks.row_check import check_rows
from asyncrl.tasks.training import train_rows

EMBEDDED = "embedded"
CONNECT_S = 5.0


class RunInUse(Exception):
    """The store has a run of this name already; says how it differs and what to do."""


class Lacks:
    """What this machine lacks of what a recipe needs. The first of it is raised; of a recipe that is for another
    machine all of it is kept, as messages."""

    def __init__(self, *, keep: bool) -> None:
        self.keep = keep
        self.kept: list[str] = []

    @contextmanager
    def but(self, *errors: type[Exception]) -> Iterator[None]:
        """In here these errors say that something is not on this machine."""
        try:
            yield
        except errors as error:
            if not self.keep:
                raise
            self.kept.append(str(error))


async def check(
    recipe: Recipe, *, url: str | None, resume: bool, collects: bool = True, neighbours: int | None = None
) -> Plan:
    """What the run takes of the machine's memory. Raises the error of the part that cannot work: DataError, TaskError,
    ModelError, RecipeError (package of a sink or engine, compiler, GPUs), BufferError, RunInUse; whether it fits says
    `Plan.check`.

    `url`: the store, None where it is to be started. `collects`: collectors will run on this host. `neighbours`: the
    learner's ranks on this host; None: all.
    """
    plan = await _check(recipe, Lacks(keep=False), url=url, resume=resume, collects=collects, neighbours=neighbours)
    assert plan is not None, "what this machine lacks was raised"
    return plan


async def survey(recipe: Recipe, *, url: str | None, resume: bool) -> tuple[Plan | None, list[str]]:
    """As `check`, for a recipe that may be for another machine: what this one lacks is no error, but in the list, and
    nothing is downloaded. The plan is None if this machine has too few GPUs. Raises what is wrong with the recipe."""
    lacks = Lacks(keep=True)
    lacks.kept += map(str, missing_files(recipe))
    plan = await _check(recipe, lacks, url=url, resume=resume, collects=True, neighbours=None)
    return plan, lacks.kept


async def _check(
    recipe: Recipe, lacks: Lacks, *, url: str | None, resume: bool, collects: bool, neighbours: int | None
) -> Plan | None:
    folder: Path | None = None
    if not lacks.kept:  # else it may be the very files that are not here
        with lacks.but(NotInstalled, models.NotHere, BuiltinModelError):
            folder = await _check_task_and_model(recipe, fetch=not lacks.keep)
    with lacks.but(RecipeError):
        sinks.check(recipe.telemetry)
    if collects:
        with lacks.but(RecipeError):
            engine_package.check(recipe.collector.engine)
    if url is not None:
        with lacks.but(BufferError):
            store = await open_store(url)
            try:
                if not resume:
                    await refuse_in_use(store, recipe)
            finally:
                await store.close()
    plan: Plan | None = None
    with lacks.but(RecipeError):
        plan = await planner.look(recipe, folder, collects=collects, neighbours=neighbours)
    if plan is not None:
        with lacks.but(RecipeError):
            compiler.check(recipe.learner, gpu=bool(plan.machine.gpus))
    return plan


async def _check_task_and_model(recipe: Recipe, *, fetch: bool) -> Path | None:
    """The folder of the model, None for a built-in one."""
    conversing = False
    if others_code(recipe.task):
        conversing = await check_apart(recipe)
    else:
        task = build_task(recipe.task, seed=recipe.run.seed)
        train_rows(task, recipe.task, seed=recipe.run.seed)
    await check_rows(recipe.task, recipe.collector, seed=recipe.run.seed)
    folder = models.check(recipe, fetch=fetch)
    if conversing and folder is not None:
        await check_apart(recipe, model_path=folder)
    return folder


async def refuse_in_use(store: Store, recipe: Recipe) -> None:
    """Raise RunInUse if the store has a run of this name that a new one would disturb."""
    name = recipe.run.name
    buffer = await store.find_run(name)
    if buffer is None:
        return
    if keys := identity_differences(buffer.recipe, to_builtins(recipe)):
        raise RunInUse(
            f"run.name {name!r} is in use in this store, by a run with other values of: {', '.join(keys)}\n"
            "Give another name (--set run.name=...), or the same recipe with --resume."
        )
    stats = await buffer.stats()
    if stats.lineage > 0:
        raise RunInUse(
            f"run.name {name!r} is in use in this store: a learner has brought it to version {stats.version}\n"
            "Continue it with --resume, or give another name (--set run.name=...)."
        )


async def is_listening(url: str) -> bool:
    """Whether there is a server at all. What is wrong with one that is there will not change by waiting."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(CONNECT_S):
            if parts.scheme == "unix":
                _, writer = await asyncio.open_unix_connection(parts.path)
            else:
                _, writer = await asyncio.open_connection(parts.hostname or "localhost", parts.port or 6379)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
