"""Rows that no rewind can touch move from the store to the archive's ledger, so that a long run's store stays small."""

from __future__ import annotations

import asyncio

from asyncrl.buffers.archive_ledger import ArchiveLedger
from asyncrl.buffers.base import Buffer
from asyncrl.staleness import Weights

CHUNK = 5000
"""Rows that move at once: about 1 MB in the store's answer, and a pause of it that nobody notices."""


async def move_settled(buffer: Buffer, ledger: ArchiveLedger, *, lineage: int, covered: Weights) -> int:
    """Move every row that is settled now, chunk by chunk; how many. covered: the oldest checkpoint that is kept.

    Each chunk is written, synced, and only then taken out of the store: whoever dies in between leaves it in both.
    Raises Fenced, OSError.
    """
    moved = 0
    while rows := await buffer.settled(lineage, limit=CHUNK):
        await asyncio.to_thread(ledger.write, covered, rows)
        await buffer.archived(lineage, [row.ordinal for row in rows])
        moved += len(rows)
    return moved
