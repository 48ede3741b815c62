"""Rows whose prompts have more tokens than the model takes: found before anything starts, by as few counts as will do.

Counting tokens takes milliseconds where looking at a row takes microseconds. So a row is counted only if the bytes of
its texts leave it in doubt (`most_tokens`), and the longest of these first, of which `COUNTED` bytes are counted.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from asyncrl.data.bad_rows import BadRows
from asyncrl.data.errors import DataError, RowError
from asyncrl.data.examined import UNKNOWN_SIZE, WORTH_KEEPING, Examined
from asyncrl.data.kept import kept
from asyncrl.data.repeated import repeated_and_contradicting
from asyncrl.data.rows import Columns, Record, most_tokens, texts_of

log = logging.getLogger(__name__)

COUNTED = 32 << 20
"""Bytes of rows in doubt that are counted for one side of the split: a minute of a tokenizer at half a megabyte a
second. Of a data set with more of them the shorter rest is counted when it is asked."""

WORTH_KEEPING_BYTES = 1 << 20
"""In doubt, whose count takes a second or two."""

FEW = 1000
"""Rows that are counted without a word: it takes about a second."""

FOUND = "tokens.json"


class Tokens(Protocol):
    """How many tokens the model's own template and tokenizer make of a row, and how many it takes."""

    limit: int
    """The most tokens of a prompt."""
    said: str
    """What sets the limit, and what to do about a longer row."""

    def key(self) -> str:
        """What decides about every row, told from all that would decide otherwise."""

    def overhead(self, record: Record) -> int | None:
        """Tokens of the prompt that are not of the record's own texts; None if that cannot be told."""

    def count(self, record: Record) -> int | None:
        """Tokens of the prompt; None if the template cannot show it, which is no matter of its length."""


class _Found(NamedTuple):
    """too_long: position -> tokens."""

    too_long: Mapping[int, int]
    uncounted: int


def measured(examined: Examined, columns: Columns, tokens: Tokens, bad: BadRows) -> tuple[Examined, int]:
    """The rows without those whose prompt is too long, of which `bad` is told; and how many were in doubt and are not
    counted.

    Raises DataError: no row is left; and what `bad` raises. What comes out depends on the rows and on `tokens.key`
    alone, so all processes with the same model have the same rows.
    """

    def keep(folder: Path) -> None:
        found = _look(examined, columns, tokens, doubtful or _doubtful(examined, columns, tokens))
        (folder / FOUND).write_text(json.dumps({**found._asdict(), "too_long": [*found.too_long.items()]}))

    doubtful: list[tuple[int, int]] = []
    worth_keeping = int((examined.sizes == UNKNOWN_SIZE).sum()) > WORTH_KEEPING
    if not worth_keeping:
        doubtful = _doubtful(examined, columns, tokens)
        worth_keeping = sum(size for _, size in doubtful) > WORTH_KEEPING_BYTES
    if worth_keeping:
        folder = kept(examined.files.sources, f"tokens of {examined.what}, by {tokens.key()}", keep)
        document = json.loads((folder / FOUND).read_bytes())
        found = _Found(dict(document["too_long"]), document["uncounted"])
    else:
        found = _look(examined, columns, tokens, doubtful)
    for position in sorted(found.too_long):
        where = examined.files.where(position)
        bad(RowError("too-long", f"{where}: the prompt has {found.too_long[position]:,} tokens, but {tokens.said}"))
    return _without(examined, sorted(found.too_long), bad), found.uncounted


def _doubtful(examined: Examined, columns: Columns, tokens: Tokens) -> list[tuple[int, int]]:
    """Positions of rows whose prompt may be too long, with the most tokens that their own texts may have; the longest
    first."""
    doubtful: list[tuple[int, int]] = []
    around = tokens.overhead(Record("", "a", None, {}))  # the same of all rows that are one text
    is_one = examined.sizes != UNKNOWN_SIZE
    in_doubt = is_one & (examined.sizes > (-1 if around is None else tokens.limit - around))
    doubtful += zip(examined.positions[in_doubt].tolist(), examined.sizes[in_doubt].tolist(), strict=True)
    for position in examined.positions[~is_one].tolist():
        record = columns.record(*examined.files.read(position))
        size, around = most_tokens(*texts_of(record.prompt)), tokens.overhead(record)
        if around is None or size + around > tokens.limit:
            doubtful.append((position, size))
    return sorted(doubtful, key=lambda found: (-found[1], found[0]))


def _look(examined: Examined, columns: Columns, tokens: Tokens, doubtful: list[tuple[int, int]]) -> _Found:
    """Count the first of `doubtful`, at least one, and at most COUNTED bytes."""
    sizes = np.cumsum([size for _, size in doubtful])
    counted = max(1, int(np.searchsorted(sizes, COUNTED, side="right")))
    if counted > FEW:
        log.info("counting the tokens of %d rows of %s", min(counted, len(doubtful)), examined.files.paths[0])
    too_long = {}
    for position, _ in doubtful[:counted]:
        count = tokens.count(columns.record(*examined.files.read(position)))
        if count is not None and count > tokens.limit:
            too_long[position] = count
    return _Found(too_long, max(0, len(doubtful) - counted))


def _without(examined: Examined, positions: list[int], bad: BadRows) -> Examined:
    """The rows but those at `positions`; what repeats and contradicts is looked for anew."""
    if not positions:
        return examined
    rows = examined.only(~np.isin(examined.positions, positions))
    if not len(rows.positions):
        raise DataError(f"{examined.files.paths[0]} has no usable row ({bad})")
    repeated, contradicting = repeated_and_contradicting(rows.positions, rows.prompts, rows.answers)
    return replace(rows, repeated=repeated, contradicting=contradicting)
