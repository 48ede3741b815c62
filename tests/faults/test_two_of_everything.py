"""Two runs in one store know nothing of each other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncrl.buffers.store import open_store, run_prefix
from tests.faults.runs import recipe_of, whole_run

pytestmark = pytest.mark.faults

STEPS = 8


@pytest.mark.asyncio
async def test_two_runs_in_one_store_are_both_complete(server_url: str, tmp_path: Path) -> None:
    """Their collectors have the same names, and one run's name begins like the other's."""
    names = ["twin", "twin-2"]
    reports = await asyncio.gather(
        *(whole_run(server_url, recipe_of(name, steps=STEPS), tmp_path / name) for name in names)
    )
    assert [report.problems for report in reports] == [[], []]
    assert [report.stats.version for report in reports] == [STEPS, STEPS]
    store = await open_store(server_url)
    assert set(names) <= set(await store.runs())
    keys = [key.decode() async for key in store.client.scan_iter(match="asyncrl:{twin*")]
    assert all(key.startswith(tuple(f"{run_prefix(name)}:" for name in names)) for key in keys)
    await store.close()
