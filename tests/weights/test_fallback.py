"""A collector whose transport fails takes files until something has arrived; outlet, senders and receivers are real."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.buffers.base import Member
from asyncrl.buffers.memory import MemoryBuffer
from asyncrl.collectors.service import collect
from asyncrl.config.convert import convert
from asyncrl.learners import outlet as outlets
from asyncrl.learners.limits import limits_of
from asyncrl.learners.outlet import Outlet
from asyncrl.staleness import Weights
from asyncrl.weights.base import StagedWeights, WeightsError
from asyncrl.weights.collective_receiver import CollectiveReceiver
from asyncrl.weights.reach import here

LIMIT_S = 60.0
FORK = Weights(0, 0)


@pytest.mark.asyncio
async def test_files_come_where_the_network_fails_and_the_network_has_its_turn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, cut = CollectiveReceiver.stage, [True]
    received: list[StagedWeights] = []

    def unreachable(self: Any, offer: Mapping[str, Any], **how: Any) -> StagedWeights:
        if cut[0]:
            raise WeightsError("no route to the learner")
        received.append(stage(self, offer, **how))
        return received[-1]

    monkeypatch.setattr(CollectiveReceiver, "stage", unreachable)
    monkeypatch.setattr(outlets, "LOOK_S", 0.1)
    recipe = convert(
        {
            "run": {"name": "fallback", "max_steps": 9},
            "collector": {"engine": {"type": "simulated"}},
            "weights": {
                "transport": "collective",
                "deadline_s": 20.0,
                "fallback": {"transport": "file", "url": str(tmp_path)},
            },
        }
    )
    buffer = MemoryBuffer("fallback", limits_of(recipe, max_length=64))
    outlet, stop = Outlet(recipe, buffer, stop=asyncio.Event()), asyncio.Event()
    collecting = asyncio.ensure_future(collect(recipe, buffer, Member("c", "c-1"), model_path=None, stop=stop))

    async def publish(version: int) -> None:
        buffer.model.version = version  # as if its step had been committed
        source = [("w", torch.full((9,), float(version)))]
        await outlet.publish(Weights(1, version), source, tied={}, fork=FORK)

    async def until(holds: Callable[[Weights | None, Mapping[str, Any]], bool]) -> None:
        while True:
            outlet.check()
            assert not collecting.done()
            member = buffer.model.members.get("c-1")
            if member is not None and holds(member.serving, member.info.get("weights", {})):
                return
            await asyncio.sleep(0.01)

    async with asyncio.timeout(LIMIT_S):
        try:
            await buffer.new_lineage(parent=None, limits=buffer.limits)
            outlet.start(here())
            await publish(0)
            await until(lambda serving, told: told.get("transport") == "file" and "no route" in told["error"])
            await until(lambda serving, told: serving == Weights(1, 0))
            assert buffer.model.members["c-1"].checksum == (await buffer.announcement())[1]["checksums"]["1/0"]
            await until(lambda serving, told: (told["transport"], told["error"]) == ("collective", ""))
            cut[0] = False
            await publish(1)
            await until(lambda serving, told: serving == Weights(1, 1))
        finally:
            stop.set()
            await asyncio.wait({collecting})
            await outlet.close()
    collecting.result()
    assert [staged.weights for staged in received] == [Weights(1, 1)]
