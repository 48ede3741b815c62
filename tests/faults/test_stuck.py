"""An answer that never ends, a collector that stands still: what waits for it ends, and nothing is trained twice."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.buffers.archive import Archive
from asyncrl.buffers.audit import audit
from asyncrl.buffers.base import Buffer, MemberStats, Waiting
from asyncrl.collectors.engines import simulated
from asyncrl.collectors.engines.base import Completion, Request
from tests.faults.runs import begin, collecting, recipe_of, to_the_end

pytestmark = pytest.mark.faults

STEPS = 6
ENDLESS = 3  # the ticket whose answers never end
DEADLINE_S = 3.0


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    length = simulated.relative_length

    def relative_length(seed: int, ticket: int, member: int, cv: float) -> float:
        return 1e6 if ticket == ENDLESS else length(seed, ticket, member, cv)

    monkeypatch.setattr(simulated, "relative_length", relative_length)


@pytest.mark.asyncio
@pytest.mark.usefixtures("endless")
async def test_a_prompt_that_always_takes_too_long_ends_as_a_straggler_and_the_run_goes_on(
    server_url: str, tmp_path: Path
) -> None:
    archive = Archive(tmp_path / "archive")
    async with collecting(server_url, recipe_of("endless", steps=STEPS), no_progress_s=DEADLINE_S) as buffer:
        await to_the_end(buffer, archive, await begin(buffer))
        report = await audit(buffer, archive)
    assert report.problems == []
    assert report.stats.version == STEPS
    assert report.stats.reasons["stale/straggler"] == 1
    assert report.trained is not None
    assert ENDLESS not in report.trained.uses


@pytest.mark.asyncio
@pytest.mark.usefixtures("endless")
async def test_without_the_deadline_the_learner_waits_for_it_by_name(server_url: str, tmp_path: Path) -> None:
    archive = Archive(tmp_path / "archive")
    async with collecting(server_url, recipe_of("endless-control", steps=STEPS)) as buffer:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2 * DEADLINE_S):
                await to_the_end(buffer, archive, await begin(buffer))
        stats = await buffer.stats()
        found = await buffer.lease(stats.lineage, stats.version, wait_s=0.0)
        await buffer.finish()
    assert isinstance(found, Waiting)
    assert ENDLESS in found.for_ordinals


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> list[simulated.SimulatedEngine]:
    """The first engine of c0 hangs from ticket 2 on: it takes requests and makes no token, while its process beats."""
    generate, found = simulated.SimulatedEngine.generate, []

    async def generate_or_hang(self: simulated.SimulatedEngine, request: Request) -> Completion:
        if self.name.startswith("c0/") and request.ticket >= 2 and found in ([], [self]):
            found[:] = [self]
            await asyncio.Event().wait()
        return await generate(self, request)

    monkeypatch.setattr(simulated.SimulatedEngine, "generate", generate_or_hang)
    return found


@pytest.mark.asyncio
async def test_requests_of_an_engine_that_hangs_behind_a_live_heartbeat_go_on_once_it_is_started_again(
    server_url: str, tmp_path: Path, hung: list[simulated.SimulatedEngine]
) -> None:
    archive = Archive(tmp_path / "archive")
    limit = {"group_timeout_s": DEADLINE_S, "score_timeout_s": DEADLINE_S / 2}
    async with collecting(server_url, recipe_of("hung", steps=STEPS, collector=limit)) as buffer:
        await to_the_end(buffer, archive, await begin(buffer))
        report = await audit(buffer, archive)
    assert hung
    assert report.problems == []
    assert report.stats.version == STEPS
    assert report.stats.lost == {}
    assert report.stats.returns.get("infrastructure", 0) == 0, "no ticket of it was given back"


@pytest.mark.asyncio
async def test_without_the_limit_its_heartbeat_would_keep_the_learner_waiting(
    server_url: str, tmp_path: Path, hung: list[simulated.SimulatedEngine]
) -> None:
    archive = Archive(tmp_path / "archive")
    async with collecting(server_url, recipe_of("hung-control", steps=STEPS)) as buffer:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2 * DEADLINE_S):
                await to_the_end(buffer, archive, await begin(buffer))
        assert {member.name for member in (await buffer.stats()).members if member.alive} == {"c0", "c1"}
        await buffer.finish()
    assert hung


START_S = 60.0  # a collector process imports, connects and joins
SILENT_S = 2.0  # after which its tickets are somebody else's


async def member(buffer: Buffer, name: str, holds: Callable[[MemberStats], bool]) -> MemberStats:
    async with asyncio.timeout(START_S):
        while True:
            for found in (await buffer.stats()).members:
                if found.name == name and holds(found):
                    return found
            await asyncio.sleep(0.01)


async def gone(buffer: Buffer, name: str) -> None:
    async with asyncio.timeout(START_S):
        while True:
            if name not in {found.name for found in (await buffer.stats()).members}:
                return
            await asyncio.sleep(0.05)


async def stop_at_work(buffer: Buffer, process: subprocess.Popen[str], name: str) -> MemberStats:
    """Stop a collector's process while it holds tickets."""
    async with asyncio.timeout(START_S):
        while True:
            process.send_signal(signal.SIGSTOP)
            found = await member(buffer, name, lambda _: True)
            if found.issued > 0:
                return found
            process.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.02)


@pytest.mark.asyncio
@pytest.mark.timeout(180)
async def test_a_collector_that_stands_still_loses_its_tickets_and_comes_back(
    server_url: str, tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    archive = Archive(tmp_path / "archive")
    recipe = recipe_of("stopped", steps=40)
    async with collecting(server_url, recipe, collectors=0, limit_s=150.0, member_timeout_s=SILENT_S) as buffer:
        weights = await begin(buffer)
        commands = {name: ("--buffer", server_url, "--run", "stopped", "--name", name) for name in ("a", "b")}
        a, b = (spawn(name, "collector", *command) for name, command in commands.items())
        for name in commands:
            await member(buffer, name, lambda found: found.serving is not None)
        training = asyncio.ensure_future(to_the_end(buffer, archive, weights))
        stopped = await stop_at_work(buffer, a, "a")
        await gone(buffer, "a")
        a.send_signal(signal.SIGCONT)
        back = await member(buffer, "a", lambda found: found.issued > 0)
        assert back.incarnation != stopped.incarnation
        await training
        assert [await asyncio.to_thread(process.wait, 30) for process in (a, b)] == [0, 0]
        report = await audit(buffer, archive)
    assert report.problems == []
    assert "joining again" in (tmp_path / "a.log").read_text()
    assert set(archive.table(columns=["collector"])["collector"].to_pylist()) == {"a", "b"}
