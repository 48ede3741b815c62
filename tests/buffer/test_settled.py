"""The store's ledger stays small: rows that no rewind can touch leave for the archive, their sums stay."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.buffers.base import BufferError, State
from asyncrl.staleness import Weights
from tests.buffer.acts import joins, limits, puts, serves, starts, takes, trains


async def _three_steps(buffer: Any, lims: Any) -> Any:
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    for step in range(3):
        (ticket,) = await takes(buffer, a, step, want=1)
        await puts(buffer, a, ticket)
        await trains(buffer, 1, step)
        await serves(buffer, a, Weights(1, step + 1))
    return a


@pytest.mark.asyncio
async def test_rows_leave_once_the_oldest_checkpoint_covers_them_and_the_sums_stay(make_buffer: Any) -> None:
    lims = limits(1, 1)
    buffer = await make_buffer(lims)
    await _three_steps(buffer, lims)
    assert await buffer.settled(1, limit=10) == [], "no checkpoint covers anything yet"
    await buffer.checkpointed(1, 3, oldest=2)
    settled = await buffer.settled(1, limit=10)
    assert [row.ordinal for row in settled] == [0, 1], "the third could be undone by going back to version 2"
    await buffer.archived(1, [0, 1, 2])
    stats, rows = await buffer.snapshot()
    assert [row.ordinal for row in rows] == [2]
    assert (stats.tickets, stats.states[State.TRAINED], stats.archived) == (3, 3, {"trained/trained": 2})
    await buffer.archived(1, [0, 1])  # its reply was lost
    assert (await buffer.stats()).archived == {"trained/trained": 2}
    assert await buffer.row(0) is None


@pytest.mark.asyncio
async def test_no_rewind_goes_behind_rows_that_have_left(make_buffer: Any) -> None:
    lims = limits(1, 1)
    buffer = await make_buffer(lims)
    await _three_steps(buffer, lims)
    await buffer.checkpointed(1, 3, oldest=2)
    await buffer.archived(1, [0, 1])
    with pytest.raises(BufferError, match="version 1 is older than the oldest that was kept"):
        await buffer.new_lineage(parent=Weights(1, 1), limits=lims)
    assert await starts(buffer, lims, Weights(1, 2)) == 2
    assert (await buffer.row(2)).state is State.RETURNED, "undone: it is generated again"


@pytest.mark.asyncio
async def test_from_the_initial_weights_also_what_had_left_is_generated_again(make_buffer: Any) -> None:
    lims = limits(1, 1)
    buffer = await make_buffer(lims)
    await _three_steps(buffer, lims)
    await buffer.checkpointed(1, 3, oldest=2)
    await buffer.archived(1, [0, 1])
    await starts(buffer, lims, None)
    stats, rows = await buffer.snapshot()
    assert [row.state for row in rows] == [State.RETURNED] * 3
    assert (stats.tickets, stats.states[State.RETURNED], stats.archived) == (3, 3, {})
    assert stats.reasons == {}


@pytest.mark.asyncio
async def test_the_memory_of_many_tickets_is_that_of_the_live_ones(make_buffer: Any) -> None:
    lims = limits(1, 5, max_steps=100, group_bytes=10, max_bytes=1000)
    buffer = await make_buffer(lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    most = 0
    for step in range(60):
        for ticket in await takes(buffer, a, step):
            await puts(buffer, a, ticket)
        await trains(buffer, 1, step)
        await serves(buffer, a, Weights(1, step + 1))
        if step % 5 == 4:
            await buffer.checkpointed(1, step + 1)
            await buffer.archived(1, [row.ordinal for row in await buffer.settled(1, limit=100)])
        most = max(most, len((await buffer.snapshot())[1]))
    assert (await buffer.stats()).tickets >= 300
    assert most <= (5 + 2) * 5 + 10, "steps since the last checkpoint, and what is live"
