"""A run to collect for: recipes, a learner that only leases, checks and commits, and a running collector."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from asyncrl.buffers.base import Lease, Member
from asyncrl.buffers.limits import Limits
from asyncrl.buffers.memory import MemoryBuffer
from asyncrl.collectors import fleet, seats
from asyncrl.collectors.engines import simulated
from asyncrl.collectors.service import collect
from asyncrl.config.convert import convert
from asyncrl.config.recipe import Recipe
from asyncrl.schema import decode, max_group_bytes, span_weights
from asyncrl.staleness import Weights

LIMIT_S = 30.0  # no wait of these tests is longer


def make_recipe(**sections: Mapping[str, Any]) -> Recipe:
    """Two members, two groups a step, age 1, on a simulated engine whose groups take about 10 ms."""
    base: dict[str, dict[str, Any]] = {
        "run": {"name": "test", "max_steps": 6},
        "buffer": {"max_trajectory_age": 1},
        "collector": {
            "engine": {"type": "simulated", "slots": 8, "token_s": 0.001, "mean_tokens": 10.0},
            "group_size": 2,
        },
        "learner": {"groups_per_step": 2},
        "weights": {"deadline_s": 10.0},
    }
    for name, section in sections.items():
        base.setdefault(name, {}).update(section)
    return convert(base)


def make_buffer(recipe: Recipe, cls: type[MemoryBuffer] = MemoryBuffer, **limits: Any) -> MemoryBuffer:
    group_bytes = max_group_bytes(recipe.collector.group_size, 4096)
    chosen = {
        "max_age": recipe.buffer.max_trajectory_age,
        "groups_per_step": recipe.learner.groups_per_step,
        "max_steps": recipe.run.max_steps,
        "group_bytes": group_bytes,
        **limits,
    }
    return cls(recipe.run.name, Limits(**chosen))


class ScriptedLearner:
    """Announces names (or what `publish` brings) and commits every batch. `batches` keeps what it leased."""

    def __init__(self, buffer: MemoryBuffer, publish: Callable[[Weights], Mapping[str, Any]] | None = None) -> None:
        self.buffer = buffer
        self.publish = publish or (lambda weights: {"transport": "none", "checksum": f"{weights.version:04x}"})
        self.weights = Weights(0, 0)
        self.batches: dict[Weights, list[pa.RecordBatch]] = {}

    async def start(self, parent: Weights | None = None, *, announce: bool = True) -> None:
        lineage = await self.buffer.new_lineage(parent=parent, limits=self.buffer.limits)
        self.fork = parent or Weights(0, 0)
        self.weights = Weights(lineage, self.fork.version)
        if announce:
            await self.announce()

    async def announce(self) -> None:
        fork = {"parent": self.fork.lineage, "version": self.fork.version}
        await self.buffer.announce(self.weights, {**self.publish(self.weights), "fork": fork})

    async def lease(self) -> Lease:
        async with asyncio.timeout(LIMIT_S):
            while not isinstance(found := await self.buffer.lease(*self.weights, wait_s=1.0), Lease):
                pass
        return found

    async def step(self, *, announce: bool = True) -> list[pa.RecordBatch]:
        lease = await self.lease()
        batches = [decode(payload) for payload in await self.buffer.payloads(lease)]
        tree = self.buffer.model.tree
        for batch in batches:
            assert all(tree.is_ancestor(weights, self.weights.lineage) for weights in span_weights(batch))
        self.batches[self.weights] = batches
        await self.buffer.commit(*self.weights)
        self.weights = Weights(self.weights.lineage, self.weights.version + 1)
        if announce:
            await self.announce()
        return batches


@asynccontextmanager
async def collecting(recipe: Recipe, buffer: MemoryBuffer, *, name: str = "c0", model_path: Path | None = None):
    """A running collector's task; told to stop at the end, if it has not ended by itself. Its error is raised."""
    stop = asyncio.Event()
    task = asyncio.ensure_future(collect(recipe, buffer, Member(name, f"{name}-1"), model_path=model_path, stop=stop))
    task.stop = stop
    try:
        yield task
    finally:
        stop.set()
        async with asyncio.timeout(LIMIT_S):
            await task


async def until(condition: Callable[[], bool], task: asyncio.Future[Any] | None = None) -> None:
    """Until a condition on this loop's own state holds."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            if task is not None and task.done():
                task.result()
                raise AssertionError("the collector ended")
            await asyncio.sleep(0.005)


class Kit:
    recipe = staticmethod(make_recipe)
    buffer = staticmethod(make_buffer)
    learner = ScriptedLearner
    collecting = staticmethod(collecting)
    until = staticmethod(until)
    limit_s = LIMIT_S


@pytest.fixture
def kit() -> type[Kit]:
    return Kit


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.collector.real import save_model  # loads torch, which most tests here do without

    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Any]:
    from asyncrl.weights.image import Images

    made = Images("test", folder=tmp_path)
    yield made
    made.close()


@pytest.fixture
def engines(monkeypatch):
    """Every simulated engine that is built; fast restarts and retries."""
    made = []

    class Kept(simulated.SimulatedEngine):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(simulated, "SimulatedEngine", Kept)
    monkeypatch.setattr(fleet, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(seats, "PAUSES_S", (0.0, 0.01))
    return made
