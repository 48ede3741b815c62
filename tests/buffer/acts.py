"""Short words for the scenarios: one collector's act each."""

from __future__ import annotations

from typing import Any

from asyncrl.buffers.base import GroupHeader, Lease, Member, Ticket
from asyncrl.buffers.limits import Limits
from asyncrl.schema import digest
from asyncrl.staleness import Weights

PAYLOAD = b"group"


def limits(max_age: int, groups_per_step: int, **more: Any) -> Limits:
    chosen: dict[str, Any] = {"max_steps": 20, "group_bytes": 10, "max_bytes": 10_000} | more
    return Limits(max_age=max_age, groups_per_step=groups_per_step, **chosen)


async def joins(buffer: Any, name: str, serving: Weights | None, incarnation: str = "") -> Member:
    member = Member(name, incarnation or f"{name}-1")
    await buffer.join(member, {})
    await serves(buffer, member, serving)
    return member


async def serves(buffer: Any, member: Member, serving: Weights | None, **progress: Any) -> Any:
    return await buffer.beat(member, serving=serving, checksum="", progress=progress.get("progress", {}), info={})


async def starts(buffer: Any, lims: Limits, parent: Weights | None = None) -> int:
    lineage: int = await buffer.new_lineage(parent=parent, limits=lims)
    await buffer.announce(Weights(lineage, parent.version if parent else 0), {"transport": "none"})
    return lineage


async def takes(buffer: Any, member: Member, seq: int, want: int = 100) -> list[Ticket]:
    tickets: list[Ticket] = await buffer.tickets(member, seq=seq, want=want, wait_s=0.0)
    return tickets


def header(ticket: Ticket, *spans: Weights, payload: bytes = PAYLOAD) -> GroupHeader:
    sampled = spans or (ticket.issued_for,)
    return GroupHeader(
        ordinal=ticket.ordinal,
        attempt=ticket.attempt,
        weights=max(sampled),
        oldest=min(s.version for s in sampled),
        newest=max(s.version for s in sampled),
        spans=tuple(sampled),
        tokens=8,
        seconds=1.0,
        digest=digest(payload),
        length=8.0,
    )


async def puts(buffer: Any, member: Member, ticket: Ticket, *spans: Weights) -> str:
    answer: str = await buffer.put(member, header(ticket, *spans), PAYLOAD)
    return answer


async def trains(buffer: Any, lineage: int, step: int, **commit: Any) -> tuple[int, ...]:
    lease = await buffer.lease(lineage, step, wait_s=0.0)
    assert isinstance(lease, Lease), lease
    await buffer.commit(lineage, step, **commit)
    return lease.ordinals
