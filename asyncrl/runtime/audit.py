"""Auditing a run: its store, wherever it is now, against the archive in its folder."""

from __future__ import annotations

from asyncrl.buffers.audit import Report, audit
from asyncrl.runtime.place import opened, place_of


async def audit_run(run: str | None, url: str | None) -> Report:
    """Audit `run`: a folder, a name, None for the newest. `url`: its store; None: the one its folder names.

    Without a folder on this host (the learner's has it) only the store is looked at.

    Raises RunFolderError, BufferError.
    """
    place = place_of(run, url)
    async with opened(place) as buffer:
        return await audit(buffer, place.archive)
