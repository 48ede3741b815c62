"""An answer that never ends, collectors that stand still: what waits ends, and nothing is lost or trained twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncrl.buffers.archive import Archive
from asyncrl.buffers.audit import audit
from asyncrl.buffers.base import Waiting
from asyncrl.collectors.engines import simulated
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
