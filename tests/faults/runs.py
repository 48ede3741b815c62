"""A short run without a model: the product's collector on a simulated engine, and a learner that trains nothing."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from asyncrl.buffers.archive import Archive
from asyncrl.buffers.audit import Report, audit
from asyncrl.buffers.base import Buffer, Lease, Limits, Member
from asyncrl.buffers.remote import RedisBuffer
from asyncrl.buffers.store import Store, open_store
from asyncrl.collectors.service import collect
from asyncrl.config.convert import convert
from asyncrl.config.recipe import Recipe, to_builtins
from asyncrl.schema import decode, max_group_bytes
from asyncrl.staleness import Weights

RUN_S = 60.0  # a run of these takes about two seconds
ROOT = Weights(0, 0)


def recipe_of(name: str, *, steps: int = 12, **sections: dict[str, Any]) -> Recipe:
    """Two groups of two a step, age 1; a group takes about 100 ms, longer than a client waits before it asks again."""
    document: dict[str, dict[str, Any]] = {
        "run": {"name": name, "max_steps": steps},
        "buffer": {"max_trajectory_age": 1},
        "collector": {
            "engine": {"type": "simulated", "slots": 8, "token_s": 0.01, "mean_tokens": 10.0},
            "group_size": 2,
        },
        "learner": {"groups_per_step": 2},
    }
    for section, keys in sections.items():
        document.setdefault(section, {}).update(keys)
    return convert(document)


def limits_for(recipe: Recipe, **limits: Any) -> Limits:
    chosen = {
        "max_age": recipe.buffer.max_trajectory_age,
        "groups_per_step": recipe.learner.groups_per_step,
        "max_steps": recipe.run.max_steps,
        "over_age": recipe.buffer.over_age,
        "group_bytes": max_group_bytes(recipe.collector.group_size, 4096),
        **limits,
    }
    return Limits(**chosen)


async def create(store: Store, recipe: Recipe, **limits: Any) -> RedisBuffer:
    return await store.create_run(
        recipe.run.name, recipe=to_builtins(recipe), recipe_hash="h", limits=limits_for(recipe, **limits)
    )


async def begin(buffer: Buffer, parent: Weights | None = None, limits: Limits | None = None) -> Weights:
    """A new lineage, announced: what a learner starts from."""
    lineage = await buffer.new_lineage(parent=parent, limits=limits or buffer.limits)
    weights = Weights(lineage, parent.version if parent else 0)
    await announce(buffer, weights, parent or ROOT)
    return weights


async def announce(buffer: Buffer, weights: Weights, fork: Weights) -> None:
    document = {"transport": "none", "checksum": f"{weights.version:04x}"}
    await buffer.announce(weights, document | {"fork": {"parent": fork.lineage, "version": fork.version}})


async def leased(buffer: Buffer, weights: Weights) -> Lease:
    while not isinstance(found := await buffer.lease(*weights, wait_s=1.0), Lease):
        pass
    return found


async def step(buffer: Buffer, archive: Archive, weights: Weights, fork: Weights = ROOT) -> Weights:
    """Lease, archive, commit, announce; the weights after it. The run's last batch may be an empty one."""
    lease = await leased(buffer, weights)
    if lease.ordinals:
        archive.write(*weights, [decode(payload) for payload in await buffer.payloads(lease)])
        await buffer.commit(*weights)
        weights = Weights(weights.lineage, weights.version + 1)
        await announce(buffer, weights, fork)
    return weights


async def whole_run(url: str, recipe: Recipe, folder: Path, *, collectors: int = 2, script: str = "") -> Report:
    """Run to the end, each part over connections of its own, and audit. `script`: one with a guard removed."""
    async with asyncio.timeout(RUN_S), AsyncExitStack() as stack:

        async def opened() -> Store:
            store = await open_store(url)
            stack.push_async_callback(store.close)
            if script:
                store.script = script
                await store.load()
            return store

        buffer, archive = await create(await opened(), recipe), Archive(folder / "archive")
        members = [Member(f"c{n}", f"c{n}-1") for n in range(collectors)]
        found = [await (await opened()).find_run(recipe.run.name) for _ in members]
        async with asyncio.TaskGroup() as group:
            for member, joined in zip(members, found, strict=True):
                assert joined is not None
                group.create_task(collect(recipe, joined, member, model_path=None, stop=asyncio.Event()))
            weights = await begin(buffer)
            while weights.version < recipe.run.max_steps:
                weights = await step(buffer, archive, weights)
            await buffer.finish()
        return await audit(buffer, archive)
