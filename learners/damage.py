"""The groups of a lease, if they are what was put. Those that are not are set aside, and no step trains the batch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

import pyarrow as pa

from asyncrl.buffers.base import Buffer, Damaged, GroupHeader, Lease
from asyncrl.schema import decode, decode_all

log = logging.getLogger(__name__)


async def sound_groups(buffer: Buffer, lease: Lease) -> list[pa.RecordBatch] | None:
    """The groups of `lease` in its order, checked in full; None if some are damaged (`corrupt`: their digest is not the
    one that was put) or not ours (`foreign`: another schema, another ticket). Those are in quarantine then, their
    tickets are generated again, and the lease is given back: lease again."""
    try:
        payloads = await buffer.payloads(lease)
    except Damaged as damaged:
        await _set_aside(buffer, lease, damaged.groups, "corrupt")
        return None
    try:
        groups = await asyncio.to_thread(decode_all, payloads)
    except ValueError:
        groups = []
    foreign = _of_others(groups, lease.headers) if groups else await asyncio.to_thread(_unreadable, payloads, lease)
    if foreign:
        await _set_aside(buffer, lease, foreign, "foreign")
        return None
    return groups


async def _set_aside(buffer: Buffer, lease: Lease, groups: Mapping[int, str], reason: str) -> None:
    for what in groups.values():
        log.warning("step %d: %s; set aside, its ticket is generated again", lease.step + 1, what)
    await buffer.quarantine(lease.lineage, lease.step, list(groups), reason)


def _unreadable(payloads: Sequence[bytes], lease: Lease) -> dict[int, str]:
    found = {}
    for ordinal, payload in zip(lease.ordinals, payloads, strict=True):
        try:
            decode(payload)
        except ValueError as error:
            found[ordinal] = f"the group of ticket {ordinal} cannot be read: {error}"
    return found


def _of_others(groups: Sequence[pa.RecordBatch], headers: Sequence[GroupHeader]) -> dict[int, str]:
    found = {}
    for group, header in zip(groups, headers, strict=True):
        name = (group.column("ticket")[0].as_py(), group.column("attempt")[0].as_py())
        if name != (header.ordinal, header.attempt):
            found[header.ordinal] = f"ticket {header.ordinal} (attempt {header.attempt}) holds the group of {name}"
    return found
