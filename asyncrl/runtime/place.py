"""Finding a run: its folder on this host, and its store, wherever that is now."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from asyncrl.buffers.archive import Archive
from asyncrl.buffers.base import BufferError
from asyncrl.buffers.remote import RedisBuffer
from asyncrl.buffers.server import EmbeddedServer, url_of
from asyncrl.buffers.store import Store, open_store, shown
from asyncrl.config.yaml_text import parse
from asyncrl.runtime import folder as folders
from asyncrl.runtime.folder import RunFolderError
from asyncrl.runtime.preflight import EMBEDDED, is_listening


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run lies. `folder`: None where it is on another host, the learner's. `url`: its store's, or EMBEDDED."""

    name: str | None  # None: the only one in the store
    folder: Path | None
    url: str

    @property
    def archive(self) -> Archive | None:
        return None if self.folder is None else Archive(self.folder / "archive")


def place_of(run: str | None, url: str | None) -> Place:
    """`run`: a folder, a name, None for the newest. `url`: its store; None: the one its folder names.

    With a `url` the run need not have a folder here; without a name, it is then the only run of that store. Raises
    RunFolderError.
    """
    try:
        folder = folders.find(run)
    except RunFolderError:
        if url is None:
            raise
        return Place(run, None, url)
    recipe = parse((folder / "recipe.yaml").read_text())
    if "buffer" not in recipe:
        raise RunFolderError(f"{folder} is of `asyncrl sft`, which has no buffer; give the folder of a run")
    return Place(recipe["run"]["name"], folder, url or recipe["buffer"]["url"])


@asynccontextmanager
async def opened(place: Place) -> AsyncIterator[RedisBuffer]:
    """The run's buffer. Raises BufferError: store away, no such run, another version's."""
    async with store_url(place) as url:
        store = await open_store(url)
        try:
            yield await _run_of(store, place.name)
        finally:
            await store.close()


async def _run_of(store: Store, name: str | None) -> RedisBuffer:
    if name is None:
        names = await store.runs()
        if len(names) != 1:
            raise BufferError(
                f"store {shown(store.url)} has {len(names)} runs; give one with --run: {', '.join(names) or 'none'}"
            )
        name = names[0]
    buffer = await store.find_run(name)
    if buffer is None:
        raise BufferError(
            f"the store has no run {name!r}; it has: {', '.join(await store.runs()) or 'none'}. "
            "A learner makes its run a few seconds after it was started."
        )
    return buffer


@asynccontextmanager
async def store_url(place: Place) -> AsyncIterator[str]:
    """Its URL, or the folder's embedded store: the running one, else one that runs for as long as it is looked at."""
    if place.folder is None or place.url != EMBEDDED:
        yield place.url
        return
    live = url_of(place.folder)
    if live is not None and await is_listening(live):
        yield live
        return
    if not (place.folder / "store").is_dir():
        raise BufferError(f"{place.folder} has no store to look into; give its URL with --buffer")
    async with EmbeddedServer(place.folder) as server:
        yield server.url
