"""Steps as a run makes them, archive part included, for tests that compare ledger and archive."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncrl.buffers.archive import Archive
from asyncrl.buffers.base import GroupHeader, Lease, Member, Ticket
from asyncrl.schema import Group, Trajectory, VersionSpan, decode, digest, encode
from asyncrl.staleness import Weights
from tests.buffer.acts import joins, serves, takes


def group_of(ticket: Ticket, weights: Weights) -> bytes:
    """One trajectory: two prompt tokens, three sampled ones."""
    trajectory = Trajectory(
        token_ids=np.array([1, 2, 3, 4, 5], np.int32),
        loss_mask=np.array([0, 0, 1, 1, 1], np.uint8),
        logprobs=np.array([0, 0, -1, -1, -1], np.float32),
        versions=np.array([-1, -1, weights.version, weights.version, weights.version], np.int32),
        member=0,
        prompt_length=2,
        spans=(VersionSpan(weights, 2, 5, "c"),),
        reward=1.0,
        reward_parts={"exact": 1.0},
        finish_reason="stop",
    )
    return encode(
        Group(
            ticket=ticket.ordinal,
            attempt=ticket.attempt,
            lineage=weights.lineage,
            task="t",
            row_id=str(ticket.ordinal),
            collector="a",
            engine="e",
            sampling={"temperature": 1.0},
            issued=1.0,
            put=2.0,
            trajectories=[trajectory],
        )
    )


async def collects(buffer: Any, member: Member, ticket: Ticket, weights: Weights) -> None:
    payload = group_of(ticket, weights)
    header = GroupHeader(
        ordinal=ticket.ordinal,
        attempt=ticket.attempt,
        weights=weights,
        oldest=weights.version,
        newest=weights.version,
        spans=(weights,),
        tokens=3,
        seconds=1.0,
        digest=digest(payload),
        length=3.0,
    )
    assert await buffer.put(member, header, payload) == "held"


async def steps(buffer: Any, archive: Archive, lineage: int, first: int, count: int, *, collector: str) -> None:
    member = await joins(buffer, collector, Weights(lineage, first))
    for step in range(first, first + count):
        for ticket in await takes(buffer, member, step, want=1):
            await collects(buffer, member, ticket, Weights(lineage, step))
        lease = await buffer.lease(lineage, step, wait_s=0.0)
        assert isinstance(lease, Lease)
        archive.write(lineage, step, [decode(p) for p in await buffer.payloads(lease)])
        await buffer.commit(lineage, step)
        await serves(buffer, member, Weights(lineage, step + 1))
