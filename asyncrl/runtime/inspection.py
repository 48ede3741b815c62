"""Tickets of a run, wherever they are now: in its store, or in its folder's archive and the ledger there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer

from asyncrl.buffers.archive import Archive
from asyncrl.buffers.archive_ledger import TIMES
from asyncrl.buffers.base import LIVE, BufferError, State, Stats, TicketRow
from asyncrl.buffers.limits import Limits
from asyncrl.buffers.remote import RedisBuffer
from asyncrl.config.errors import RecipeError
from asyncrl.config.loading import recipe_from_document
from asyncrl.config.yaml_text import parse
from asyncrl.runtime import models
from asyncrl.runtime.finished import Run
from asyncrl.runtime.place import Place, opened
from asyncrl.schema import decode
from asyncrl.staleness import Weights
from asyncrl.telemetry.metrics import read_metrics
from asyncrl.telemetry.ticket import Decode

PAGE = 200
"""Ledger rows asked for at once: a page takes the store a millisecond, so that nobody else waits for it."""


class Unreadable(Exception):
    """Something that is there and cannot be read; names what it is and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Found:
    """A ticket. `recipe`: of its run, as the store or the folder has it. `stats`, `limits`: None where the store could
    not be asked, for the reason `without`. `row`: None where neither the store nor the archive's ledger has it on this
    host. `group`: None where it has none, or none that this host can read. `trained_at`: when the step that trained it
    was done, unix seconds."""

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

    Raises BufferError: neither store nor archive has it; Unreadable.
    """
    archive = place.archive
    try:
        async with opened(place) as buffer:
            stats, row = await buffer.stats(), await buffer.row(ordinal)
            payload = await buffer.payload(ordinal) if row is not None and row.has_payload else None
            if row is not None and row.has_payload and payload is None:  # trained meanwhile
                row = await buffer.row(ordinal)
    except BufferError as error:
        if archive is None or place.folder is None:
            raise
        row = moved_row(place.folder, ordinal)
        step = row.trained if row is not None else _step_of(archive, ordinal)
        if row is None and step is None:
            raise
        recipe = parse((place.folder / "recipe.yaml").read_text())
        found = Found(ordinal, recipe, row=row, without=str(error))
        return found if step is None else _trained(place.folder, step, found)
    if not 0 <= ordinal < stats.tickets:
        raise BufferError(f"ticket {ordinal} was never issued: the run has {stats.tickets} so far, from 0 on")
    if row is None and place.folder is not None:
        row = moved_row(place.folder, ordinal)
    found = Found(ordinal, buffer.recipe, stats, buffer.limits, row)
    if row is None:
        return found
    if row.state in LIVE:
        return found if payload is None else replace(found, group=_decoded(payload, ordinal))
    return found if row.trained is None or place.folder is None else _trained(place.folder, row.trained, found)


def _trained(folder: Path, step: Weights, found: Found) -> Found:
    """With the group from the archive's part of that step, where it still is."""
    try:
        groups = Archive(folder / "archive").groups(step)
    except FileNotFoundError:
        groups = []
    except ValueError as error:
        raise Unreadable(f"the archive's part with ticket {found.ordinal} is damaged: {error}") from None
    group = next((group for group in groups if group.column("ticket")[0].as_py() == found.ordinal), None)
    return replace(found, group=group, trained=step, trained_at=_trained_at(folder, step))


def _decoded(payload: bytes, ordinal: int) -> pa.RecordBatch:
    try:
        return decode(payload)
    except ValueError as error:
        raise Unreadable(f"the group of ticket {ordinal} is damaged: {error}") from None


def _step_of(archive: Archive, ordinal: int) -> Weights | None:
    """The last step of the surviving branch that trained the ticket, by the archive alone. Raises Unreadable."""
    for lineage, first, last in reversed(archive.branch()):
        for step in (Weights(lineage, version) for version in range(last, first - 1, -1)):
            try:
                if any(ticket == ordinal for ticket, _ in archive.tickets(step)):
                    return step
            except FileNotFoundError:  # size-capped: what is left is looked at
                continue
            except (pa.ArrowException, OSError) as error:
                raise Unreadable(
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


async def ledger_rows(
    buffer: RedisBuffer, folder: Path | None, states: Sequence[State], *, start: int, most: int
) -> list[TicketRow]:
    """The first `most` ledger rows in these states from ordinal `start` on, whether they are in the store or, with the
    run's `folder`, in the archive's ledger."""
    rows = {row.ordinal: row async for row in rows_of(buffer, *states, start=start, most=most)}
    # After the store: a row that moves meanwhile is in one of the two, or in both.
    moved = [] if folder is None else moved_rows(folder, states, start=start, most=most)
    rows |= {row.ordinal: row for row in moved}
    return [rows[ordinal] for ordinal in sorted(rows)[:most]]


def moved_row(folder: Path, ordinal: int) -> TicketRow | None:
    """The row of one ticket in the archive's ledger."""
    found = moved_rows(folder, list(State), start=ordinal, most=1)
    return found[0] if found and found[0].ordinal == ordinal else None


def moved_rows(folder: Path, states: Sequence[State], *, start: int, most: int) -> list[TicketRow]:
    """The first `most` rows of the archive's ledger in these states from ordinal `start` on. Raises Unreadable."""
    try:
        table = Run(folder).ledger
    except (pa.ArrowException, OSError) as error:
        raise Unreadable(f"the archive's ledger in {folder} is damaged: {error}") from None
    wanted = (pc.field("ordinal") >= start) & pc.field("state").isin([state.value for state in states])
    return [_moved(row) for row in table.filter(wanted).slice(0, most).to_pylist()]


def _moved(row: Mapping[str, Any]) -> TicketRow:
    uses = tuple(Weights(use["lineage"], use["version"]) for use in row["uses"])
    return TicketRow(
        ordinal=row["ordinal"],
        state=State(row["state"]),
        attempt=row["attempt"],
        reason=row["reason"],
        trained=uses[-1] if uses else None,
        owner="",
        lo=None,
        has_payload=False,
        size=0,
        uses=uses,
        losses=row["losses"],
        requeues=row["requeues"],
        times={name: row[name] for name in TIMES if row[name] is not None},
    )


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
