"""Damaged and foreign groups are never trained: they are set aside, generated again, and the run goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffers.archive import Archive
from asyncrl.buffers.base import BufferError, GroupHeader, Member, PutResult
from asyncrl.buffers.memory import MemoryBuffer
from asyncrl.config.recipe import Buffer, Collector, Eval, Learner, Recipe, Run
from asyncrl.learners import damage
from asyncrl.learners.limits import limits_of
from asyncrl.learners.service import learn
from asyncrl.schema import digest
from asyncrl.staleness import Weights

RECIPE = Recipe(
    run=Run(name="damage", max_steps=3),
    buffer=Buffer(max_trajectory_age=1),
    collector=Collector(group_size=4),
    learner=Learner(groups_per_step=3),
    eval=Eval(at_start=False, at_end=False),
)


class DamagingBuffer(MemoryBuffer):
    """The first attempt of some tickets does not survive its way through the store."""

    def __init__(self) -> None:
        super().__init__(RECIPE.run.name, limits_of(RECIPE, max_length=64))
        self.other = b""

    async def put(self, member: Member, header: GroupHeader, payload: bytes) -> PutResult:
        if header.ordinal == 0:
            self.other = payload
        if (header.ordinal, header.attempt) == (1, 0):  # a flipped bit
            return await super().put(member, header, payload[:-9] + bytes([payload[-9] ^ 1]) + payload[-8:])
        if (header.ordinal, header.attempt) == (2, 0):  # written by something else
            return await super().put(member, replace(header, digest=digest(b"not Arrow")), b"not Arrow")
        if (header.ordinal, header.attempt) == (4, 0):  # sound, but another ticket's
            return await super().put(member, replace(header, digest=digest(self.other)), self.other)
        return await super().put(member, header, payload)


@pytest.fixture
def collector(
    model_path: Path, draw: Any, make_row: Any, make_group: Any, scripted: Any
) -> Callable[[MemoryBuffer], Any]:
    return lambda buffer: scripted.ScriptedCollector(
        buffer, model_path, sample=draw, make_row=make_row, make_group=make_group
    )


async def _run(buffer: MemoryBuffer, worker: Any, folder: Path, model_path: Path) -> None:
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(worker.run())
        group.create_task(
            learn(RECIPE, buffer, run_dir=folder, model_path=model_path, resume=None, stop=asyncio.Event())
        )


@pytest.mark.asyncio
async def test_damaged_and_foreign_groups_are_set_aside_and_generated_again(
    tmp_path: Path, model_path: Path, collector: Any
) -> None:
    buffer = DamagingBuffer()
    await _run(buffer, collector(buffer), tmp_path, model_path)
    stats = await buffer.stats()
    assert (stats.quarantined, stats.returns["corrupt"], stats.returns["foreign"]) == (3, 1, 2)
    assert set(await buffer.quarantined()) == {"1:0", "2:0", "4:0"}
    assert stats.error is None
    trained = {pair for step in range(3) for pair in Archive(tmp_path / "archive").tickets(Weights(1, step))}
    assert {(0, 0), (1, 1), (2, 1), (4, 1)} <= trained
    assert not {(1, 0), (2, 0), (4, 0)} & trained


@pytest.mark.asyncio
async def test_without_the_quarantine_one_flipped_bit_ends_the_run(
    tmp_path: Path, model_path: Path, collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""

    async def nothing(*_: object) -> None:
        raise BufferError("damaged")

    monkeypatch.setattr(damage, "_set_aside", nothing)
    buffer = DamagingBuffer()
    with pytest.raises(ExceptionGroup):
        await _run(buffer, collector(buffer), tmp_path, model_path)
    assert (await buffer.stats()).error is not None
