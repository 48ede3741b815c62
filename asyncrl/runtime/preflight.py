"""Everything a person can get wrong, checked before any process starts. Loads no torch."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from asyncrl.buffers.store import Store, open_store
from asyncrl.config.identity import identity_differences
from asyncrl.config.recipe import Recipe, to_builtins
from asyncrl.runtime import engine_package, models, planner, sinks
from asyncrl.runtime.planner import Plan
from asyncrl.runtime.task_check import OTHERS_CODE, check_apart
from asyncrl.tasks.build import build_task

EMBEDDED = "embedded"
CONNECT_S = 5.0


class RunInUse(Exception):
    """The store has a run of this name already; says how it differs and what to do."""


async def check(recipe: Recipe, *, url: str | None, resume: bool, collects: bool = True) -> Plan:
    """What the run takes of this machine's memory. Raises the error of the part that cannot work: DataError, TaskError,
    ModelError, RecipeError (the package of a sink or engine), BufferError, RunInUse; whether it fits says `Plan.check`.

    `url`: the store, None where it is to be started. `collects`: collectors will run on this host.
    """
    conversing = False
    if isinstance(recipe.task, OTHERS_CODE):
        conversing = await check_apart(recipe)
    else:
        build_task(recipe.task, seed=recipe.run.seed)
    folder = models.check(recipe)
    if conversing and folder is not None:
        await check_apart(recipe, model_path=folder)
    sinks.check(recipe.telemetry)
    if collects:
        engine_package.check(recipe.collector.engine)
    if url is not None:
        store = await open_store(url)
        try:
            if not resume:
                await refuse_in_use(store, recipe)
        finally:
            await store.close()
    return await planner.look(recipe, folder, collects=collects)


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
