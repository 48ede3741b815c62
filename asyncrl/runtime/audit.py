"""Finding what an audit compares: a run's store, wherever it is now, and the archive in its folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from asyncrl.buffers.archive import Archive
from asyncrl.buffers.audit import Report, audit
from asyncrl.buffers.base import BufferError
from asyncrl.buffers.server import EmbeddedServer, url_of
from asyncrl.buffers.store import open_store
from asyncrl.config.yaml_text import parse
from asyncrl.runtime import folder as folders
from asyncrl.runtime.folder import RunFolderError
from asyncrl.runtime.preflight import EMBEDDED, is_listening


async def audit_run(run: str | None, url: str | None) -> Report:
    """Audit `run`: a folder, a name, None for the newest. `url`: its store; None: the one its folder names.

    Without a folder on this host (the learner's has it) only the store is looked at, by the run's name. Raises
    RunFolderError, BufferError.
    """
    try:
        folder = folders.find(run)
    except RunFolderError:
        if run is None or url is None:
            raise
        return await _audit(url, run, None)
    recipe = parse((folder / "recipe.yaml").read_text())
    async with _store_of(folder, url or recipe["buffer"]["url"]) as where:
        return await _audit(where, recipe["run"]["name"], Archive(folder / "archive"))


async def _audit(url: str, name: str, archive: Archive | None) -> Report:
    store = await open_store(url)
    try:
        buffer = await store.find_run(name)
        if buffer is None:
            raise BufferError(f"the store has no run {name!r}; it has: {', '.join(await store.runs()) or 'none'}")
        return await audit(buffer, archive)
    finally:
        await store.close()


@asynccontextmanager
async def _store_of(folder: Path, url: str) -> AsyncIterator[str]:
    """`url`, or the embedded store of the folder: the running one, else one that runs as long as the audit."""
    if url != EMBEDDED:
        yield url
        return
    live = url_of(folder)
    if live is not None and await is_listening(live):
        yield live
        return
    if not (folder / "store").is_dir():
        raise BufferError(f"{folder} has no store to audit; give its URL with --buffer")
    async with EmbeddedServer(folder) as server:
        yield server.url
