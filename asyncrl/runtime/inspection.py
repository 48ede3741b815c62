"""Finding what is looked at: a run's store, wherever it is now, its folder, and one ticket in either of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from tokenizers import Tokenizer

from asyncrl.buffers.archive import Archive
from asyncrl.buffers.base import LIVE, BufferError, Limits, State, Stats, TicketRow
from asyncrl.buffers.remote import RedisBuffer
from asyncrl.buffers.server import EmbeddedServer, url_of
from asyncrl.buffers.store import Store, open_store, shown
from asyncrl.config.errors import RecipeError
from asyncrl.config.loading import recipe_from_document
from asyncrl.config.yaml_text import parse
from asyncrl.runtime import folder as folders
from asyncrl.runtime import models
from asyncrl.runtime.folder import RunFolderError
from asyncrl.runtime.preflight import EMBEDDED, is_listening
from asyncrl.schema import decode
from asyncrl.staleness import Weights
from asyncrl.telemetry.metrics import read_metrics
from asyncrl.telemetry.ticket import Decode

PAGE = 200
"""Ledger rows asked for at once: a page takes the store a millisecond, so that nobody else waits for it."""


class DamagedGroup(Exception):
    """A group that is there and cannot be read; names the ticket and what is wrong with it."""


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
    async with _store_url(place) as url:
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
async def _store_url(place: Place) -> AsyncIterator[str]:
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


@dataclass(frozen=True, slots=True)
class Found:
    """A ticket. `recipe`: of its run, as the store or the folder has it. `stats`, `limits`: None where the store could
    not be asked, for the reason `without`. `row`: None where the store does not have it (any more). `group`: None where
    it has none, or none that this host can read. `trained_at`: when the step that trained it was done, unix seconds."""

    ordinal: int
    recipe: Mapping[str, Any]
    stats: Stats | None = None
    limits: Limits | None = None
    row: TicketRow | None = None
    group: pa.RecordBatch | None = None
    trained: Weights | None = None
    trained_at: float | None = None
    without: str = ""


async def find_ticket(place: Place, ordinal: int) -> Found:
    """The ticket. A trained one's group comes from the archive, also where the store is away.

    Raises BufferError: neither store nor archive has it; DamagedGroup.
    """
    archive = place.archive
    try:
        async with opened(place) as buffer:
            stats, row = await buffer.stats(), await buffer.row(ordinal)
            payload = await buffer.payload(ordinal) if row is not None and row.has_payload else None
            if row is not None and row.has_payload and payload is None:  # trained meanwhile
                row = await buffer.row(ordinal)
    except BufferError as error:
        step = None if archive is None else _step_of(archive, ordinal)
        if step is None or place.folder is None:
            raise
        recipe = parse((place.folder / "recipe.yaml").read_text())
        return _trained(place.folder, step, Found(ordinal, recipe, without=str(error)))
    if not 0 <= ordinal < stats.tickets:
        raise BufferError(f"ticket {ordinal} was never issued: the run has {stats.tickets} so far, from 0 on")
    found = Found(ordinal, buffer.recipe, stats, buffer.limits, row)
    if row is not None and row.state in LIVE:
        return found if payload is None else replace(found, group=_decoded(payload, ordinal))
    step = row.trained if row is not None else (None if archive is None else _step_of(archive, ordinal))
    return found if step is None or place.folder is None else _trained(place.folder, step, found)


def _trained(folder: Path, step: Weights, found: Found) -> Found:
    """With the group from the archive's part of that step, where it still is."""
    try:
        groups = Archive(folder / "archive").groups(step)
    except FileNotFoundError:
        groups = []
    except ValueError as error:
        raise DamagedGroup(f"the archive's part with ticket {found.ordinal} is damaged: {error}") from None
    group = next((group for group in groups if group.column("ticket")[0].as_py() == found.ordinal), None)
    return replace(found, group=group, trained=step, trained_at=_trained_at(folder, step))


def _decoded(payload: bytes, ordinal: int) -> pa.RecordBatch:
    try:
        return decode(payload)
    except ValueError as error:
        raise DamagedGroup(f"the group of ticket {ordinal} is damaged: {error}") from None


def _step_of(archive: Archive, ordinal: int) -> Weights | None:
    """The last step of the surviving branch that trained the ticket, by the archive alone. Raises DamagedGroup."""
    for lineage, first, last in reversed(archive.branch()):
        for step in (Weights(lineage, version) for version in range(last, first - 1, -1)):
            try:
                if any(ticket == ordinal for ticket, _ in archive.tickets(step)):
                    return step
            except FileNotFoundError:  # size-capped: what is left is looked at
                continue
            except (pa.ArrowException, OSError) as error:
                raise DamagedGroup(
                    f"the archive's part of lineage {lineage} step {step.version} is damaged: {error}"
                ) from None
    return None


def _trained_at(folder: Path, step: Weights) -> float | None:
    """When the learner was done with a step: `time` of its record in metrics.jsonl."""
    try:
        records = read_metrics(folder / "metrics.jsonl")
    except FileNotFoundError:
        return None
    for record in records:
        if "event" not in record and (record.get("lineage"), record.get("version")) == (step.lineage, step.version + 1):
            return float(record["time"])
    return None


async def rows_of(
    buffer: RedisBuffer, *states: State, start: int = 0, most: int | None = None
) -> AsyncIterator[TicketRow]:
    """Ledger rows in these states from ordinal `start` on, page by page: a long ledger keeps nobody waiting. `most`:
    rows."""
    left = most
    while left is None or left > 0:
        page = await buffer.rows(states=states, start=start, limit=PAGE if left is None else min(PAGE, left))
        for row in page:
            yield row
        if not page:
            return
        start = page[-1].ordinal + 1
        left = None if left is None else left - len(page)


def decoder(place: Place, recipe: Mapping[str, Any]) -> tuple[Decode, str]:
    """How token ids of the run's model read, and ""; where no tokenizer is found, as numbers, and why.

    The newest checkpoint has one; before the first, the model's own folder. `tokenizers` alone loads it: transformers
    would take seconds.
    """
    saved = [] if place.folder is None else list((place.folder / "checkpoints").glob("*/tokenizer.json"))
    if saved:
        file: Path | None = max(saved, key=lambda path: path.stat().st_mtime)
    else:
        try:
            file = models.find_tokenizer(recipe_from_document(recipe))
        except RecipeError as error:
            return _numbers, f"the recipe cannot be read here: {error}"
    if file is None:
        return _numbers, f"the tokenizer of {recipe['model']['path']} is not on this host"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more special
        return _numbers, f"{file} cannot be loaded: {error}"
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)), ""


def _numbers(ids: Sequence[int]) -> str:
    return "".join(f"{token} " for token in ids)
