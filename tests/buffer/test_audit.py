"""The audit is clean on a sound run and names each thing that was tampered with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffers.archive import Archive, Stretch
from asyncrl.buffers.audit import audit, branch_of
from asyncrl.buffers.base import State, Ticket
from asyncrl.schema import decode
from asyncrl.staleness import Weights
from tests.buffer.acts import joins, limits, starts, takes
from tests.buffer.whole_steps import collects, group_of, steps


@pytest.mark.asyncio
async def test_a_run_that_was_resumed_twice_is_clean(make_buffer: Any, tmp_path: Path) -> None:
    lims = limits(1, 1, group_bytes=1 << 14, max_bytes=1 << 20)
    buffer, archive = await make_buffer(lims), Archive(tmp_path)
    await starts(buffer, lims)
    await steps(buffer, archive, 1, 0, 4, collector="a")
    await starts(buffer, lims, Weights(1, 2))
    await steps(buffer, archive, 2, 2, 3, collector="b")
    await starts(buffer, lims, Weights(2, 3))
    await steps(buffer, archive, 3, 3, 1, collector="c")
    report = await audit(buffer, archive)
    assert report.problems == []
    assert branch_of(report.stats) == [Stretch(1, 0, 1), Stretch(2, 2, 2), Stretch(3, 3, 3)]
    assert report.trained is not None
    assert report.trained.tokens_by_age == {0: 12}
    assert report.lines()[-1] == "clean"


@pytest.mark.asyncio
async def test_each_tampering_is_named(make_buffer: Any, tmp_path: Path) -> None:
    lims = limits(1, 1, group_bytes=1 << 14, max_bytes=1 << 20)
    buffer, archive = await make_buffer(lims), Archive(tmp_path)
    await starts(buffer, lims)
    await steps(buffer, archive, 1, 0, 3, collector="a")
    archive.write(1, 1, [decode(group_of(Ticket(0, 0, Weights(1, 0), 0.0), Weights(1, 0)))])  # ticket 0 once more
    problems = (await audit(buffer, archive)).problems
    assert any(p.startswith("ticket 0 is trained 2 times") for p in problems)
    assert any(p.startswith("ticket 1 is trained in the ledger") for p in problems)
    (tmp_path / "step-0001-000001.parquet").unlink()
    assert (await audit(buffer, archive)).problems == [f"archive: {tmp_path}: no part of lineage 1 step 1"]


@pytest.mark.asyncio
async def test_over_age_tokens_in_the_archive_break_the_bound_that_is_claimed(make_buffer: Any, tmp_path: Path) -> None:
    lims = limits(1, 1, group_bytes=1 << 14, max_bytes=1 << 20)
    buffer, archive = await make_buffer(lims), Archive(tmp_path)
    await starts(buffer, lims)
    await steps(buffer, archive, 1, 0, 3, collector="a")
    archive.write(1, 2, [decode(group_of(Ticket(2, 0, Weights(1, 0), 0.0), Weights(1, 0)))])
    assert "archive: a trained token is 2 versions old, the bound is 1" in (await audit(buffer, archive)).problems


@pytest.mark.asyncio
async def test_sums_that_do_not_follow_from_the_rows_are_named(make_buffer: Any) -> None:
    from asyncrl.buffers.audit import ledger_problems

    lims = limits(1, 2, group_bytes=1 << 14, max_bytes=1 << 20)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    for ticket in (await takes(buffer, a, 0))[:2]:
        await collects(buffer, a, ticket, Weights(1, 0))
    stats, rows = await buffer.snapshot()
    assert ledger_problems(stats, rows, lims) == []
    lost = replace(rows[0], has_payload=False)
    assert ledger_problems(stats, [lost, *rows[1:]], lims) == ["ticket 0 (held) is held without its group"]
    twice = replace(rows[1], state=State.ISSUED)
    found = ledger_problems(stats, [rows[0], twice, *rows[2:]], lims)
    assert any(p.startswith("tickets in state held: the store counts 2") for p in found)
    assert any("4 tickets were issued" in p for p in ledger_problems(stats, rows[:-1], lims))
