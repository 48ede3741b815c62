"""`asyncrl status --verify-weights`: do the engines serve, bit for bit, what the learner published?"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from typing import Any

from asyncrl.buffers.base import BufferError
from asyncrl.buffers.remote import RedisBuffer
from asyncrl.runtime.place import Place, opened
from asyncrl.runtime.weights_text import Checked, answered, checked

LOOK_S = 0.2  # between two looks at who has answered
BEATS_S = 10.0
"""What a collector gets beyond `weights.deadline_s`, which bounds its hashing: beats to hear of it and to answer."""


async def verify_weights(place: Place) -> list[Checked]:
    """Ask every collector that is alive to hash what its engines serve now, and compare. Ends after the recipe's
    `weights.deadline_s` and BEATS_S: who has not answered then is a row that says so.

    Raises BufferError: store away, no such run, it has ended, or nobody is there.
    """
    async with opened(place) as buffer:
        return await verify(buffer, limit_s=float(buffer.recipe["weights"]["deadline_s"]) + BEATS_S)


async def verify(buffer: RedisBuffer, *, limit_s: float) -> list[Checked]:
    """The same for an open buffer."""
    stats = await buffer.stats()
    if stats.phase == "ended":
        raise BufferError(f"run {stats.run} has ended: no collector serves anything")
    if not any(member.alive for member in stats.members):
        raise BufferError(f"run {stats.run} has no collector that is alive: there is nothing to verify")
    # Before and after: weights move on meanwhile, and the learner keeps the checksums of the last versions only.
    published = await _published(buffer)
    request_id = uuid.uuid4().hex
    await buffer.request_verification(request_id)
    deadline = time.monotonic() + limit_s
    while True:
        members = (await buffer.stats()).members
        waiting = [member for member in members if member.alive and not answered(member, request_id)]
        if not waiting or time.monotonic() >= deadline:
            return checked(members, request_id, {**published, **await _published(buffer)})
        await asyncio.sleep(LOOK_S)


async def _published(buffer: RedisBuffer) -> dict[str, str]:
    """`lineage/version` -> checksum, of the versions that the announced document knows."""
    found = await buffer.announcement()
    if found is None:
        return {}
    weights, document = found
    return {**_own(f"{weights.lineage}/{weights.version}", document), **document.get("checksums", {})}


def _own(name: str, document: Mapping[str, Any]) -> dict[str, str]:
    """Weights that are only names have one checksum, of the newest."""
    checksum = document.get("checksum")
    return {name: str(checksum)} if checksum else {}
