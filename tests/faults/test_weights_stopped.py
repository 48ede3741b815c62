"""Collectors whose processes are stopped, then killed, in each phase of new weights; real ones, and a real outlet."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from msgspec import to_builtins

from asyncrl.buffers.base import MemberStats
from asyncrl.buffers.remote import RedisBuffer
from asyncrl.learners.outlet import Outlet
from asyncrl.runtime.weights_text import weights_lines
from asyncrl.staleness import Weights
from asyncrl.weights.base import Late
from asyncrl.weights.image import Images
from asyncrl.weights.reach import here
from asyncrl.weights.segments import READERS
from asyncrl.weights.shm import shm_offer
from tests.faults.runs import ROOT, collecting, leased, recipe_of

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.asyncio, pytest.mark.timeout(240)]

PHASES = ("announce", "stage", "activate", "verify")
DEADLINE_S = 8.0
SILENT_S = 24.0  # after which the run gives a collector up: it is late long before
LIMIT_S = 90.0
SLOW = str(Path(__file__).parent / "slow_collector.py")

Spawn = Callable[..., "subprocess.Popen[str]"]


class Learner:
    """Trains nothing; its weights go through the product's outlet."""

    def __init__(self, buffer: RedisBuffer, outlet: Outlet, weights: Weights) -> None:
        self.buffer, self.outlet, self.weights = buffer, outlet, weights
        self.late: dict[str, Late] = {}

    async def publish(self) -> None:
        value = torch.full((50_000,), float(self.weights.version))
        await self.outlet.publish(self.weights, [("w", value)], tied={}, fork=ROOT)

    async def step(self, *, publish: bool = True) -> None:
        await leased(self.buffer, self.weights)
        await self.buffer.commit(*self.weights)
        self.weights = Weights(self.weights.lineage, self.weights.version + 1)
        if publish:
            await self.publish()

    async def members(self) -> dict[str, MemberStats]:
        return {member.name: member for member in (await self.buffer.stats()).members}

    async def until(self, holds: Callable[[dict[str, MemberStats]], bool]) -> None:
        """Until the members are so. Who has become late meanwhile is kept."""
        while not holds(await self.members()):
            self.outlet.check()
            self.late |= {one.member: one for one in self.outlet.take_late()}
            await asyncio.sleep(0.05)
        self.late |= {one.member: one for one in self.outlet.take_late()}


@asynccontextmanager
async def learning(url: str, name: str, *, deadline_s: float) -> AsyncIterator[Learner]:
    """A run of version 0 and its learner; its collectors are the test's."""
    recipe = recipe_of(name, steps=40, weights={"deadline_s": deadline_s})
    async with collecting(url, recipe, collectors=0, limit_s=LIMIT_S, member_timeout_s=SILENT_S) as buffer:
        lineage = await buffer.new_lineage(parent=None, limits=buffer.limits)
        outlet = Outlet(recipe, buffer, stop=asyncio.Event())
        outlet.start(here())
        try:
            learner = Learner(buffer, outlet, Weights(lineage, 0))
            await learner.publish()
            yield learner
            await buffer.finish()
        finally:
            await outlet.close()


def begin(spawn: Spawn, url: str, run: str, phase: str) -> subprocess.Popen[str]:
    """A collector that is named after the phase in which it gets stuck."""
    arguments = (phase, "collector", "--buffer", url, "--run", run, "--name", phase)
    return spawn(phase, *arguments, program=(SLOW,))


def phase_of(member: MemberStats | None) -> str | None:
    return None if member is None else member.progress.get("weights", {}).get("phase")


async def test_who_stands_still_in_any_phase_is_named_and_the_others_finish(server_url: str, spawn: Spawn) -> None:
    async with learning(server_url, "stopped-phases", deadline_s=DEADLINE_S) as learner:
        processes = {phase: begin(spawn, server_url, "stopped-phases", phase) for phase in (*PHASES, "none")}
        await learner.until(lambda members: sum(m.serving is not None for m in members.values()) == len(processes))
        await learner.step(publish=False)
        processes["announce"].send_signal(signal.SIGSTOP)  # before it can hear of anything
        await learner.publish()
        for phase in PHASES[1:]:
            await learner.until(lambda members, phase=phase: phase_of(members.get(phase)) == phase)
            processes[phase].send_signal(signal.SIGSTOP)
        await learner.until(lambda members: members["none"].serving == Weights(1, 1))
        await learner.until(lambda members: set(learner.late) == set(PHASES))
        assert {name: (late.phase, late.weights) for name, late in learner.late.items()} == {
            phase: (phase, Weights(1, 1)) for phase in PHASES
        }
        said = {line.split()[0]: line for line in weights_lines(await learner.buffer.stats())}
        for phase in PHASES[1:]:
            assert f"{phase} 1/1 for" in said[phase]

        for phase in PHASES:
            processes[phase].send_signal(signal.SIGKILL)
        await learner.until(lambda members: set(members) == {"none"})
        for _ in range(3):
            await learner.step()
        await learner.until(lambda members: members["none"].serving == learner.weights)
        assert not set(learner.late) - set(PHASES), "the one that works was never late"
    assert await asyncio.to_thread(processes["none"].wait, 30) == 0


async def test_without_a_deadline_nobody_is_named(server_url: str, spawn: Spawn) -> None:
    """Negative control of the test above."""
    async with learning(server_url, "no-deadline", deadline_s=1000.0) as learner:
        process = begin(spawn, server_url, "no-deadline", "announce")
        await learner.until(lambda members: any(m.serving is not None for m in members.values()))
        await learner.step(publish=False)
        process.send_signal(signal.SIGSTOP)
        await learner.publish()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5 * DEADLINE_S):
                await learner.until(lambda members: bool(learner.late))
        process.send_signal(signal.SIGKILL)


async def test_a_receiver_that_is_stuck_in_the_kernel_holds_up_neither_the_collector_nor_its_end(
    server_url: str, tmp_path: Path, spawn: Spawn
) -> None:
    """Its segment is a pipe that nobody opens for writing: opening it never returns."""
    recipe = recipe_of("stuck-receiver", steps=40, weights={"deadline_s": 1.0})
    images = Images("stuck-receiver", folder=tmp_path)
    async with collecting(server_url, recipe, collectors=0, limit_s=LIMIT_S) as buffer:
        weights = Weights(await buffer.new_lineage(parent=None, limits=buffer.limits), 0)

        async def announce(*, stuck: bool) -> None:
            image = await asyncio.to_thread(images.write, weights, [("w", torch.zeros(9))], tied={})
            for name in (image.path, Path(f"{image.path}{READERS}")) if stuck else ():
                name.unlink()
                os.mkfifo(name)
            place, fork = to_builtins(here()), {"parent": 0, "version": 0}
            await buffer.announce(weights, {"place": place, "fork": fork, "offers": [shm_offer(image)]})

        async def until(holds: Callable[[MemberStats], object]) -> None:
            while True:
                if any(holds(member) for member in (await buffer.stats()).members):
                    return
                await asyncio.sleep(0.05)

        await announce(stuck=False)
        arguments = ("collector", "--buffer", server_url, "--run", "stuck-receiver", "--name", "c")
        process = spawn("c", *arguments)
        await until(lambda member: member.serving == weights)
        await leased(buffer, weights)
        await buffer.commit(*weights)
        weights = Weights(weights.lineage, 1)
        await announce(stuck=True)
        await until(lambda member: phase_of(member) == "stage")
        await until(lambda member: "did not come back within" in member.progress["weights"]["error"])
        await leased(buffer, weights)  # from the older weights: it goes on answering
        await buffer.finish()
    images.close()
    assert await asyncio.to_thread(process.wait, 30) == 0
