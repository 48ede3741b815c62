"""A look at every row before anything starts: which can be used, and what tells each prompt and answer from others."""

from __future__ import annotations

import json
import logging
from array import array
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from asyncrl.data.bad_rows import BadRows
from asyncrl.data.errors import DataError, RowError
from asyncrl.data.files import Files
from asyncrl.data.kept import kept
from asyncrl.data.repeated import repeated_and_contradicting
from asyncrl.data.rows import Columns, Record, most_tokens, texts_of
from asyncrl.data.split import prompt_key

log = logging.getLogger(__name__)

ALL_ROWS = 500_000
"""Of so many rows every one is looked at: some 10 s, once, and what it found is kept."""

FIRST_ROWS = 100_000
"""Of more rows the first so many are looked at, in about a second. What is wrong with a file usually is wrong from the
start; and held-out rows, which are taken from these, are far more than anybody evaluates."""

WORTH_KEEPING = 20_000
"""Rows whose look takes a few tenths of a second."""

UNKNOWN_SIZE = 2**32 - 1
"""Of a row that is more than one text: how much a chat template adds depends on the row."""


@dataclass(frozen=True, slots=True)
class Examined:
    """The rows of `files` that can be used, out of the first `seen`: their positions (int64), hashes (uint64) of prompt
    and answer, and sizes (uint32): `most_tokens` of a prompt that is one text, else UNKNOWN_SIZE. `repeated` and
    `contradicting`: pairs of positions, as `repeated_and_contradicting` says. what: the look, for what is kept."""

    files: Files
    seen: int
    what: str
    positions: np.ndarray
    prompts: np.ndarray
    answers: np.ndarray
    sizes: np.ndarray
    repeated: np.ndarray
    contradicting: np.ndarray

    @property
    def unseen(self) -> int:
        """Rows that are looked at when they are read."""
        return len(self.files) - self.seen

    def digest(self, *, drops: bool) -> str:
        """16 hex digits over the prompts of these rows, their places, and how many rows there are: what is asked. Not
        over answers: one that was corrected changes no prompt. drops: rows that repeat earlier ones are left out."""
        asked = xxhash.xxh3_64(str(len(self.files)).encode())
        for array_of in (self.positions, self.prompts, *([self.repeated] if drops else [])):
            asked.update(np.ascontiguousarray(array_of).tobytes())
        return asked.hexdigest()

    def only(self, chosen: np.ndarray) -> Examined:
        """Those of `chosen`, a bool for each row that can be used."""
        arrays = {name: getattr(self, name)[chosen] for name in ("positions", "prompts", "answers", "sizes")}
        return replace(self, **arrays)


def examine(files: Files, columns: Columns, bad: BadRows) -> Examined:
    """Look at all rows, or at the first of very many. `bad`, which has counted nothing yet, is told of those that
    cannot be used. Raises DataError: no row can be used; and what `bad` raises."""
    seen = len(files) if len(files) <= ALL_ROWS else FIRST_ROWS
    what = f"examined {seen} as {files.formats} by {json.dumps(asdict(columns))}, bad rows: {bad.policy}"

    def keep(folder: Path) -> None:
        log.info("looking at %d rows of %s: once, what is found is kept", seen, files.paths[0])
        for name, array_of in _look(files, columns, seen, bad).items():
            np.save(folder / f"{name}.npy", array_of)
        (folder / "bad.json").write_text(json.dumps(bad.document()))

    if seen <= WORTH_KEEPING:
        found = _look(files, columns, seen, bad)
    else:
        folder = kept(files.sources, what, keep)
        found = {file.stem: np.load(file) for file in folder.glob("*.npy")}
        if not bad.counts:
            bad.restore(json.loads((folder / "bad.json").read_bytes()))
    return Examined(files, seen, what, **found)


def _look(files: Files, columns: Columns, first: int, bad: BadRows) -> dict[str, np.ndarray]:
    """What `Examined` has of the `first` rows. Raises DataError: none can be used."""
    positions, prompts, answers = (array("Q") for _ in range(3))
    sizes = array("I")
    known: set[int] = set()

    def usable(where: str, own_id: str, row: dict[str, Any]) -> Record:
        record = columns.record(where, own_id, row)
        if columns.id is not None:
            own = xxhash.xxh3_64_intdigest(record.id.encode())
            if own in known:
                raise RowError("same-id", f"{where}: an earlier row has the id {record.id!r}: give each row its own")
            known.add(own)
        return record

    for position, record in files.parsed(usable, bad, first=first):
        positions.append(position)
        prompts.append(prompt_key(record.prompt))
        answers.append(xxhash.xxh3_64_intdigest((record.answer or "").encode()))
        is_one = isinstance(record.prompt, str) and "tools" not in record.info
        sizes.append(most_tokens(*texts_of(record.prompt)) if is_one else UNKNOWN_SIZE)
    if not positions:
        answered = f" and {columns.answer!r}" if columns.answer is not None else ""
        problem = f"has no usable row ({bad})" if str(bad) else "is empty"
        raise DataError(
            f"{files.paths[0]} {problem}: it needs at least one row with the columns {columns.prompt!r}{answered}"
        )
    rows = {
        "positions": np.array(positions, np.int64),
        "prompts": np.array(prompts, np.uint64),
        "answers": np.array(answers, np.uint64),
    }
    repeated, contradicting = repeated_and_contradicting(**rows)
    return {**rows, "sizes": np.array(sizes, np.uint32), "repeated": repeated, "contradicting": contradicting}
