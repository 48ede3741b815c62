"""A short run without a model: the product's collector on a simulated engine, and a learner that trains nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from asyncrl.buffers.archive import Archive
from asyncrl.buffers.audit import Report, audit
from asyncrl.buffers.base import Buffer, Lease, Member
from asyncrl.buffers.limits import Limits
from asyncrl.buffers.remote import RedisBuffer
from asyncrl.buffers.store import Store, open_store
from asyncrl.collectors.service import collect
from asyncrl.config.convert import convert
from asyncrl.config.recipe import Recipe, to_builtins
from asyncrl.schema import decode, max_group_bytes, span_weights
from asyncrl.staleness import Lineages, Weights

RUN_S = 60.0  # a run of these takes about two seconds
ROOT = Weights(0, 0)

Clock = Callable[[], float]


def recipe_of(name: str, *, steps: int = 12, **sections: dict[str, Any]) -> Recipe:
    """Two groups of two a step, age 1; a group takes about 50 ms, longer than a client waits before it asks again."""
    document: dict[str, dict[str, Any]] = {
        "run": {"name": name, "max_steps": steps},
        "buffer": {"max_trajectory_age": 1},
        "collector": {
            "engine": {"type": "simulated", "slots": 8, "token_s": 0.005, "mean_tokens": 10.0},
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


async def step(
    buffer: Buffer, archive: Archive, weights: Weights, fork: Weights = ROOT, *, skipped: bool = False
) -> Weights:
    """Lease, archive, commit, announce; the weights after it: the same ones if nothing is left to train."""
    lease = await leased(buffer, weights)
    if not lease.ordinals:
        return weights
    groups = [decode(payload) for payload in await buffer.payloads(lease)]
    tree = Lineages({lineage: tuple(origin) for lineage, origin in (await buffer.stats()).forks.items()})
    dead = [name for group in groups for name in span_weights(group) if not tree.is_ancestor(name, weights.lineage)]
    assert not dead, f"step {weights} would train tokens of dead weights {dead}"
    archive.write(*weights, groups)
    await buffer.commit(*weights, skipped=skipped)
    weights = Weights(weights.lineage, weights.version + 1)
    await announce(buffer, weights, fork)
    return weights


@asynccontextmanager
async def collecting(
    url: str,
    recipe: Recipe,
    *,
    collectors: int = 2,
    script: str = "",
    clock: Clock | None = None,
    limit_s: float = RUN_S,
    **limits: Any,
) -> AsyncIterator[RedisBuffer]:
    """A learner's buffer of a new run, and collectors that work for it, each over connections of its own, until the run
    has been finished. `script`: the server's, with a guard removed."""
    async with asyncio.timeout(limit_s), AsyncExitStack() as stack:

        async def opened() -> Store:
            store = await open_store(url)
            stack.push_async_callback(store.close)
            if script:
                store.script = script
                await store.load()
            return store

        buffer = await create(await opened(), recipe, **limits)
        joined = [await (await opened()).find_run(recipe.run.name) for _ in range(collectors)]
        buffer.clock = clock
        async with asyncio.TaskGroup() as group:
            for n, own in enumerate(joined):
                assert own is not None
                own.clock = clock
                member = Member(f"c{n}", f"c{n}-1")
                group.create_task(collect(recipe, own, member, model_path=None, stop=asyncio.Event()))
            yield buffer


async def to_the_end(buffer: Buffer, archive: Archive, weights: Weights, fork: Weights = ROOT) -> None:
    """Train from `weights` until the run's last step, and finish it."""
    while (
        weights.version < buffer.limits.max_steps and (after := await step(buffer, archive, weights, fork)) != weights
    ):
        weights = after
    await buffer.finish()


async def whole_run(url: str, recipe: Recipe, folder: Path, **how: Any) -> Report:
    """Run to the end, and audit."""
    archive = Archive(folder / "archive")
    async with collecting(url, recipe, **how) as buffer:
        await to_the_end(buffer, archive, await begin(buffer))
        report = await audit(buffer, archive)
    return report
