"""Rows that leave the store for the archive's ledger: each ticket is counted once, wherever a learner dies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.buffers.archive import Archive
from asyncrl.buffers.audit import audit
from asyncrl.buffers.base import BufferError, TicketRow
from asyncrl.buffers.limits import Limits
from asyncrl.learners import ledger as ledgers
from asyncrl.learners.ledger import move_settled
from asyncrl.learners.recovery import recover
from asyncrl.staleness import Weights
from tests.buffer.acts import joins, limits, starts, takes
from tests.buffer.whole_steps import steps

LIMITS = limits(1, 1, group_bytes=1 << 14, max_bytes=1 << 20)


class Dies(Exception):
    """The learner's process ends here."""


class DyingBuffer:
    """A buffer whose learner dies after it has written rows, before it has told the store."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    async def settled(self, lineage: int, *, limit: int) -> list[TicketRow]:
        rows: list[TicketRow] = await self.buffer.settled(lineage, limit=limit)
        return rows

    async def archived(self, lineage: int, ordinals: Sequence[int]) -> None:
        raise Dies


async def run_to(buffer: Any, archive: Archive, lineage: int, first: int, last: int) -> None:
    """Train steps `first` to `last` - 1."""
    await steps(buffer, archive, lineage, first, last - first, collector=f"c{lineage}-{first}")


async def checkpoints(buffer: Any, archive: Archive, lineage: int, version: int, *, oldest: Weights) -> int:
    await buffer.checkpointed(lineage, version, oldest=oldest.version)
    return await move_settled(buffer, archive.ledger, lineage=lineage, covered=oldest)


async def problems(buffer: Any, archive: Archive) -> list[str]:
    return (await audit(buffer, archive)).problems


def files(archive: Archive) -> list[str]:
    return sorted(path.name for path in archive.ledger.folder.iterdir())


@pytest.mark.asyncio
async def test_settled_rows_are_in_the_archive_and_no_longer_in_the_store(make_buffer: Any, tmp_path: Path) -> None:
    buffer, archive = await make_buffer(LIMITS), Archive(tmp_path)
    await starts(buffer, LIMITS)
    member = await joins(buffer, "bad", Weights(1, 0))
    (ticket,) = await takes(buffer, member, 0, want=1)
    await buffer.fail(member, ticket.ordinal, 0, kind="data", reason="row_error", tokens=0, seconds=0.0)
    await run_to(buffer, archive, 1, 0, 4)
    assert await checkpoints(buffer, archive, 1, 4, oldest=Weights(1, 3)) == 4
    stats, rows = await buffer.snapshot()
    assert stats.archived == {"failed/row_error": 1, "trained/trained": 3}
    assert len(rows) == stats.tickets - 4
    assert await problems(buffer, archive) == []
    table = archive.ledger.table(lambda weights: True)
    assert table["ordinal"].to_pylist() == [0, 1, 2, 3]
    assert table["reason"].to_pylist() == ["row_error", "trained", "trained", "trained"]
    assert table["uses"].to_pylist()[1] == [{"lineage": 1, "version": 0}]
    assert all(table["ended"].to_pylist())


@pytest.mark.asyncio
async def test_a_learner_that_dies_before_the_store_knows_writes_twice_and_counts_once(
    make_buffer: Any, tmp_path: Path
) -> None:
    buffer, archive = await make_buffer(LIMITS), Archive(tmp_path)
    await starts(buffer, LIMITS)
    await run_to(buffer, archive, 1, 0, 4)
    await buffer.checkpointed(1, 4, oldest=2)
    with pytest.raises(Dies):
        await move_settled(DyingBuffer(buffer), archive.ledger, lineage=1, covered=Weights(1, 2))
    assert await problems(buffer, archive) == []

    await starts(buffer, LIMITS, Weights(1, 4))
    await run_to(buffer, archive, 2, 4, 6)
    assert await checkpoints(buffer, archive, 2, 6, oldest=Weights(1, 4)) == 4
    assert files(archive) == ["0001-000002-0000.parquet", "0001-000004-0000.parquet"]
    assert await problems(buffer, archive) == []
    assert archive.ledger.table(lambda weights: True)["ordinal"].to_pylist() == [0, 1, 2, 3]


@pytest.mark.asyncio
async def test_a_run_goes_on_from_the_oldest_checkpoint_that_was_kept_and_from_no_older_one(
    make_buffer: Any, tmp_path: Path
) -> None:
    buffer, archive = await make_buffer(LIMITS), Archive(tmp_path)
    await starts(buffer, LIMITS)
    await run_to(buffer, archive, 1, 0, 5)
    await checkpoints(buffer, archive, 1, 5, oldest=Weights(1, 2))
    with pytest.raises(BufferError, match="older than the oldest that was kept"):
        await starts(buffer, LIMITS, Weights(1, 1))
    await starts(buffer, LIMITS, Weights(1, 2))
    assert await problems(buffer, archive) == []
    await run_to(buffer, archive, 2, 2, 6)
    await checkpoints(buffer, archive, 2, 6, oldest=Weights(2, 5))
    report = await audit(buffer, archive)
    assert report.problems == []
    assert report.trained is not None
    assert sorted(report.trained.uses) == list(range(6))
    assert report.stats.archived == {"trained/trained": 5}


@pytest.mark.asyncio
async def test_a_run_that_begins_again_voids_what_had_moved(make_buffer: Any, tmp_path: Path) -> None:
    buffer, archive = await make_buffer(LIMITS), Archive(tmp_path)
    await starts(buffer, LIMITS)
    await run_to(buffer, archive, 1, 0, 3)
    await checkpoints(buffer, archive, 1, 3, oldest=Weights(1, 3))
    await starts(buffer, LIMITS)
    await run_to(buffer, archive, 2, 0, 2)
    assert await problems(buffer, archive) == []
    await checkpoints(buffer, archive, 2, 2, oldest=Weights(2, 2))
    report = await audit(buffer, archive)
    assert report.problems == []
    assert report.stats.archived == {"trained/trained": 2}


@pytest.mark.asyncio
async def test_every_use_of_a_ticket_is_in_its_row(make_buffer: Any, tmp_path: Path) -> None:
    lims = limits(2, 1, group_bytes=1 << 14, max_bytes=1 << 20, max_uses=2)
    buffer, archive = await make_buffer(lims), Archive(tmp_path)
    await starts(buffer, lims)
    await run_to(buffer, archive, 1, 0, 5)
    assert await checkpoints(buffer, archive, 1, 5, oldest=Weights(1, 4)) == 2
    await starts(buffer, lims, Weights(1, 4))
    await run_to(buffer, archive, 2, 4, 6)
    assert await problems(buffer, archive) == []
    uses = archive.ledger.table(lambda weights: True)["uses"].to_pylist()
    assert uses[1] == [{"lineage": 1, "version": 2}, {"lineage": 1, "version": 3}]

    third = archive.groups(Weights(1, 3))
    archive.write(2, 4, third)  # negative control
    found = await problems(buffer, archive)
    assert any(problem.startswith("ticket 1 is trained 3 times in the surviving weights") for problem in found)


@pytest.mark.asyncio
async def test_a_store_that_lost_everything_is_told_of_tickets_that_had_moved_as_well(
    make_buffer: Any, tmp_path: Path
) -> None:
    buffer, archive = await make_buffer(LIMITS), Archive(tmp_path)
    await starts(buffer, LIMITS)
    member = await joins(buffer, "bad", Weights(1, 0))
    (ticket,) = await takes(buffer, member, 0, want=1)
    await buffer.fail(member, ticket.ordinal, 0, kind="data", reason="row_error", tokens=0, seconds=0.0)
    await run_to(buffer, archive, 1, 0, 4)
    assert await checkpoints(buffer, archive, 1, 4, oldest=Weights(1, 3)) == 4

    empty = await make_buffer(LIMITS)
    await recover(empty, archive, forks={1: (0, 0)}, own=Weights(1, 4))
    await starts(empty, LIMITS, Weights(1, 4))
    assert await problems(empty, archive) == []
    await run_to(empty, archive, 2, 4, 7)  # ticket 0, which had failed, is generated again
    assert await checkpoints(empty, archive, 2, 7, oldest=Weights(2, 6)) > 0
    report = await audit(empty, archive)
    assert report.problems == []
    assert report.trained is not None
    assert report.trained.uses[0] == [Weights(2, 4)]
    table = archive.ledger.table(lambda weights: True)
    assert table["ordinal"].to_pylist() == list(range(table.num_rows))
    assert table["state"][0].as_py() == "trained", "what was said last holds"


@pytest.mark.asyncio
async def test_many_rows_move_in_chunks_and_no_file_is_written_over(
    make_buffer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgers, "CHUNK", 2)
    buffer, archive = await make_buffer(LIMITS), Archive(tmp_path)
    await starts(buffer, LIMITS)
    await run_to(buffer, archive, 1, 0, 5)
    assert await checkpoints(buffer, archive, 1, 5, oldest=Weights(1, 5)) == 5
    assert len(files(archive)) == 3
    assert await checkpoints(buffer, archive, 1, 5, oldest=Weights(1, 5)) == 0
    path = archive.ledger.write(Weights(1, 5), [])
    assert path.name == "0001-000005-0003.parquet"
    assert await problems(buffer, archive) == []


async def moved_run(make_buffer: Any, folder: Path, lims: Limits = LIMITS) -> tuple[Any, Archive, Path]:
    """A run with three rows in one file of the archive's ledger."""
    buffer, archive = await make_buffer(lims), Archive(folder)
    await starts(buffer, lims)
    await run_to(buffer, archive, 1, 0, 4)
    await checkpoints(buffer, archive, 1, 4, oldest=Weights(1, 3))
    (path,) = archive.ledger.folder.iterdir()
    return buffer, archive, path


@pytest.mark.asyncio
async def test_a_missing_file_is_missed_ticket_by_ticket(make_buffer: Any, tmp_path: Path) -> None:
    """Negative control: the store's word alone is not believed."""
    buffer, archive, path = await moved_run(make_buffer, tmp_path)
    path.unlink()
    found = await problems(buffer, archive)
    assert [f"ticket {n} is neither in the store nor in the archive's ledger" for n in range(3)] == found[:3]
    assert "tickets that moved to the archive as trained/trained: the store counts 3, the rows give 0" in found
    assert any(problem.startswith("ticket 0 is trained in the archive (lineage 1 step 0)") for problem in found)


@pytest.mark.asyncio
async def test_a_damaged_file_is_named(make_buffer: Any, tmp_path: Path) -> None:
    buffer, archive, path = await moved_run(make_buffer, tmp_path)
    path.write_bytes(path.read_bytes()[:50])
    found = await problems(buffer, archive)
    assert found[0].startswith("archive's ledger: 0001-000003-0000.parquet cannot be read: ")


@pytest.mark.asyncio
async def test_contradictions_are_named(make_buffer: Any, tmp_path: Path) -> None:
    """Negative control: a row that tells of another step than the archive's part, a later file or the store does."""
    buffer, archive, path = await moved_run(make_buffer, tmp_path)
    whole = pq.read_table(path)
    uses = whole["uses"].to_pylist()
    uses[1] = [{"lineage": 1, "version": 2}]
    changed = whole.set_column(4, whole.schema.field(4), pa.array(uses, type=whole.schema.field(4).type))
    pq.write_table(changed, path)
    assert await problems(buffer, archive) == [
        "ticket 1 is trained in the archive (lineage 1 step 1), the ledger says lineage 1 step 2"
    ]
    pq.write_table(whole, path.with_name("0001-000003-0001.parquet"))
    assert await problems(buffer, archive) == [
        "archive's ledger: ticket 1 was trained/trained (lineage 1 step 2), "
        "0001-000003-0001.parquet says trained/trained (lineage 1 step 1)"
    ]
    path.unlink()
    held = [{**row, "ordinal": 3, "uses": [{"lineage": 1, "version": 0}]} for row in whole.slice(0, 1).to_pylist()]
    pq.write_table(pa.Table.from_pylist(held, schema=whole.schema), path)
    assert "ticket 3 is trained/trained (lineage 1 step 0) in the archive's ledger, " in "\n".join(
        await problems(buffer, archive)
    )
