"""Learners that go back, change, skip and run out of work, while collectors live on: ledger and archive agree."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.buffers.archive import Archive
from asyncrl.buffers.audit import audit
from asyncrl.buffers.base import Buffer, State
from asyncrl.buffers.store import script_text
from asyncrl.collectors.updates import Updates
from asyncrl.staleness import Weights
from tests.faults.runs import RUN_S, begin, collecting, recipe_of, step, to_the_end

pytestmark = pytest.mark.faults

STEPS = 10
PAUSE_S = 0.01


@pytest.fixture
def one_stays_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collector c1 never hears of a second lineage: it goes on with what it serves."""
    announced = Updates.announced

    def of_the_first_lineage(self: Updates, weights: Weights | None, announcements: int) -> None:
        if weights is None or weights.lineage == 1 or not self._fleet.hosts[0].engine.name.startswith("c1/"):
            announced(self, weights, announcements)

    monkeypatch.setattr(Updates, "announced", of_the_first_lineage)


async def served(buffer: Buffer, weights: Weights) -> None:
    """Until every collector serves these weights."""
    for _ in range(int(RUN_S / PAUSE_S)):
        if all(member.serving == weights for member in (await buffer.stats()).members):
            return
        await asyncio.sleep(PAUSE_S)
    raise TimeoutError(f"no collector came to serve {weights}")


async def train(buffer: Buffer, archive: Archive, weights: Weights, *, until: int) -> Weights:
    while weights.version < until:
        weights = await step(buffer, archive, weights)
    return weights


async def rewound(url: str, name: str, folder: Path, script: str = "") -> list[str]:
    """Five steps, a checkpoint of version 2, collectors at version 5, then a learner that starts from 2. Returns
    what is wrong at the end."""
    archive = Archive(folder / "archive")
    async with collecting(url, recipe_of(name, steps=STEPS), script=script) as buffer:
        weights = await train(buffer, archive, await begin(buffer), until=2)
        await buffer.checkpointed(*weights)
        await served(buffer, await train(buffer, archive, weights, until=5))
        again = await begin(buffer, parent=weights)
        assert again == Weights(2, 2)
        await to_the_end(buffer, archive, again, fork=weights)
        report = await audit(buffer, archive)
    assert report.stats.forks == {1: Weights(0, 0), 2: Weights(1, 2)}
    assert report.stats.version == STEPS
    return report.problems


@pytest.mark.asyncio
@pytest.mark.usefixtures("one_stays_behind")
async def test_a_learner_restored_to_an_older_checkpoint_trains_nothing_of_the_newer_weights(
    server_url: str, tmp_path: Path
) -> None:
    assert await rewound(server_url, "rewound", tmp_path) == []


@pytest.mark.asyncio
@pytest.mark.usefixtures("one_stays_behind")
async def test_without_the_family_tree_tokens_of_dead_weights_would_be_trained(server_url: str, tmp_path: Path) -> None:
    guard = "return limit ~= nil and version <= limit"
    assert guard in script_text()
    script = script_text().replace(guard, "return true")
    with pytest.raises(BaseExceptionGroup) as caught:
        await rewound(server_url, "without-tree", tmp_path, script)
    assert "would train tokens of dead weights [Weights(lineage=1, version=5)" in str(caught.value.exceptions)


@pytest.mark.asyncio
@pytest.mark.parametrize("batch_sizes", [(4, 1, 3), (1, 4)])
async def test_each_resumed_learner_may_bring_another_batch_size(
    server_url: str, tmp_path: Path, batch_sizes: tuple[int, ...]
) -> None:
    archive = Archive(tmp_path / "archive")
    recipe = recipe_of(f"sizes-{len(batch_sizes)}", steps=STEPS, learner={"groups_per_step": batch_sizes[0]})
    async with collecting(server_url, recipe) as buffer:
        weights, fork, sizes = await begin(buffer), Weights(0, 0), []
        for n, size in enumerate(batch_sizes):
            if n > 0:  # as a crash would leave it: two steps after the checkpoint
                fork = weights
                await buffer.checkpointed(*fork)
                await train(buffer, archive, weights, until=weights.version + 2)
                weights = await begin(buffer, parent=fork, limits=replace(buffer.limits, groups_per_step=size))
            for _ in range(2):
                weights = await step(buffer, archive, weights, fork)
                sizes.append(len(archive.trained().order[-1][1]))
        await to_the_end(buffer, archive, weights, fork)
        report = await audit(buffer, archive)
    assert sizes == [size for size in batch_sizes for _ in range(2)]
    assert report.problems == []


@pytest.mark.asyncio
@pytest.mark.parametrize("age", [0, 1])
async def test_skipped_steps_consume_their_batches_and_the_run_goes_on(
    server_url: str, tmp_path: Path, age: int
) -> None:
    archive = Archive(tmp_path / "archive")
    recipe = recipe_of(f"skipped-{age}", steps=STEPS, buffer={"max_trajectory_age": age})
    async with collecting(server_url, recipe) as buffer:
        weights = await begin(buffer)
        while weights.version < STEPS:
            weights = await step(buffer, archive, weights, skipped=weights.version % 3 == 1)
        await buffer.finish()
        report = await audit(buffer, archive)
    assert report.problems == []
    assert report.stats.reasons["trained/skipped"] == 6
    assert report.stats.reasons["trained/trained"] == 14
    assert report.trained is not None
    assert report.trained.max_age == age


@pytest.mark.asyncio
async def test_the_last_batch_is_as_short_as_what_is_left(server_url: str, tmp_path: Path) -> None:
    archive = Archive(tmp_path / "archive")
    async with collecting(server_url, recipe_of("short", steps=STEPS), max_tickets=7) as buffer:
        await to_the_end(buffer, archive, await begin(buffer))
        report = await audit(buffer, archive)
    assert report.problems == []
    assert [len(tickets) for _, tickets in archive.trained().order] == [2, 2, 2, 1]
    assert report.stats.states[State.TRAINED] == 7
