"""The store's clock is set forward and back in mid-run: nobody's work is taken, nobody is waited for any longer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from asyncrl.buffers.archive import Archive
from asyncrl.buffers.audit import Report, audit
from asyncrl.buffers.store import script_text
from tests.faults.runs import begin, collecting, recipe_of, step, to_the_end

pytestmark = pytest.mark.faults

STEPS = 9
HOUR_S = 3600.0


@dataclass
class Set:
    """A clock that somebody sets."""

    by: float = 0.0

    def __call__(self) -> float:
        return time.time() + self.by


async def run_with_jumps(url: str, name: str, folder: Path, script: str = "") -> Report:
    archive, clock = Archive(folder / "archive"), Set()
    recipe = recipe_of(name, steps=STEPS)
    async with collecting(url, recipe, clock=clock, script=script) as buffer:
        weights = await begin(buffer)
        for jump in (HOUR_S, -2 * HOUR_S, 24 * HOUR_S):
            for _ in range(2):
                weights = await step(buffer, archive, weights)
            clock.by += jump
        await to_the_end(buffer, archive, weights)
        return await audit(buffer, archive)


@pytest.mark.asyncio
async def test_a_clock_that_is_set_takes_nobodys_work(
    server_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = await run_with_jumps(server_url, "clock", tmp_path)
    assert report.problems == []
    assert report.stats.version == STEPS
    assert report.stats.lost == {}
    assert "member_lost" not in report.stats.returns
    assert "joining again" not in caplog.text


@pytest.mark.asyncio
async def test_on_the_servers_own_clock_every_collector_would_be_given_up(
    server_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    guard = "local CLOCK_STEP_S = 5 "
    assert guard in script_text()
    script = script_text().replace(guard, "local CLOCK_STEP_S = 1e9 ")
    report = await run_with_jumps(server_url, "clock-control", tmp_path, script)
    assert report.problems == [], "even so nothing is lost"
    assert "is not known to the run; joining again" in caplog.text
