"""A run of the buffer and its one collector, each operation called by hand."""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import Any

import numpy as np

from asyncrl.buffers.base import GroupHeader, Lease, Member, Ticket
from asyncrl.buffers.limits import Limits
from asyncrl.buffers.remote import RedisBuffer
from asyncrl.buffers.store import Store
from asyncrl.schema import Group, Trajectory, VersionSpan, digest
from asyncrl.staleness import Weights

MEMBERS = 8

BYTES = """
local total, at = 0, '0'
repeat
  local found = redis.call('SCAN', at, 'MATCH', ARGV[1], 'COUNT', 1000)
  at = found[1]
  for _, key in ipairs(found[2]) do total = total + (redis.call('MEMORY', 'USAGE', key, 'SAMPLES', 0) or 0) end
until at == '0'
return total
"""
"""A script: a thousand collectors have ten thousand keys, and asking for each would weigh on what is measured."""


def header_of(ticket: Ticket, payload: bytes, *, tokens: int = MEMBERS) -> GroupHeader:
    """Of a group that took a second, all of it sampled by the weights the ticket was issued for."""
    served = ticket.issued_for
    return GroupHeader(
        ordinal=ticket.ordinal,
        attempt=ticket.attempt,
        weights=served,
        oldest=served.version,
        newest=served.version,
        spans=(served,),
        tokens=tokens,
        seconds=1.0,
        digest=digest(payload),
        length=1.0,
    )


class Run:
    def __init__(self, buffer: RedisBuffer, lineage: int) -> None:
        self.buffer, self.lineage = buffer, lineage
        self.member = Member("bench", "1")
        self.seq = count()
        self.step = 0
        self.work: deque[Ticket] = deque()  # issued, oldest first

    @classmethod
    async def start(cls, store: Store, name: str, limits: Limits) -> Run:
        buffer = await store.create_run(name, recipe={}, recipe_hash=name, limits=limits)
        run = cls(buffer, await buffer.new_lineage(parent=None, limits=limits))
        await buffer.join(run.member, {})
        await run.serve(0)
        return run

    async def serve(self, version: int) -> None:
        weights = Weights(self.lineage, version)
        await self.buffer.beat(self.member, serving=weights, checksum="", progress={}, info={})

    async def tickets(self, want: int) -> list[Ticket]:
        return await self.buffer.tickets(self.member, seq=next(self.seq), want=want, wait_s=0.0)

    async def put(self, header: GroupHeader, payload: bytes) -> None:
        answer = await self.buffer.put(self.member, header, payload)
        assert answer == "held", answer

    async def lease(self, step: int) -> list[bytes]:
        """A batch's groups, each of them checked."""
        leased = await self.buffer.lease(self.lineage, step, wait_s=0.0)
        assert isinstance(leased, Lease), leased
        return await self.buffer.payloads(leased)


async def bytes_of_run(buffer: RedisBuffer) -> int:
    """What the run's keys take in the store; the server's own total has its clients' buffers in it."""
    return int(await buffer.store.client.eval(BYTES, 0, f"{buffer.prefix}:*"))


def timeless(**chosen: Any) -> Limits:
    """Without limits of time: a slow machine is not a lost collector."""
    return Limits(member_timeout_s=1e6, ticket_progress_s=1e6, no_progress_s=1e9, **chosen)


def group_of(ordinal: int, length: int) -> Group:
    """A group of MEMBERS answers of `length` tokens each, 16 of them the prompt's (fewer where it is shorter)."""
    prompt = min(16, length // 2)
    sampled = np.arange(length) >= prompt
    rng = np.random.default_rng(ordinal)
    rows = [
        Trajectory(
            token_ids=rng.integers(0, 50_000, length, np.int32),
            loss_mask=sampled.astype(np.uint8),
            logprobs=np.where(sampled, rng.random(length, np.float32) - 1, 0).astype(np.float32),
            versions=np.where(sampled, 0, -1).astype(np.int32),
            member=member,
            prompt_length=prompt,
            spans=(VersionSpan(Weights(1, 0), prompt, length, "c"),),
            reward=0.5,
            reward_parts={"exact": 0.5},
            finish_reason="stop",
        )
        for member in range(MEMBERS)
    ]
    return Group(
        ticket=ordinal,
        attempt=0,
        lineage=1,
        task="bench",
        row_id=str(ordinal),
        collector="bench",
        engine="bench",
        sampling={"temperature": 1.0},
        issued=0.0,
        put=0.0,
        trajectories=rows,
    )
