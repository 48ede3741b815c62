"""Questions and answers out of a recipe's files: opened, looked at, split, and read row by row.

Nothing of a row stays in memory: what is held is 8 bytes of each row that was looked at. See `examined` for how much
that is, and `docs/data.md` for what this means to rows of very large files.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from asyncrl.data.bad_rows import BadRows
from asyncrl.data.errors import DataError, RowError
from asyncrl.data.examined import Examined, examine
from asyncrl.data.files import open_files
from asyncrl.data.rows import Columns, Record
from asyncrl.data.split import held_out, prompt_key

if TYPE_CHECKING:
    from asyncrl.config.recipe import DataSource

log = logging.getLogger(__name__)


class Side(Sequence[Record]):
    """The rows of one side of the split. Reading one raises RowError for a row that was not looked at before and cannot
    be used, and DataError for a file that was changed."""

    def __init__(self, examined: Examined, columns: Columns, *, unseen: int, foreign: np.ndarray) -> None:
        """unseen: rows beyond those that were looked at, that belong here too. foreign: prompts (uint64) that none of
        them may have."""
        self._examined = examined
        self._columns = columns
        self._unseen = unseen
        self._foreign = frozenset(foreign.tolist()) if unseen else frozenset()

    def __len__(self) -> int:
        return len(self._examined.positions) + self._unseen

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        looked_at = len(self._examined.positions)
        if index < looked_at:
            return self._read(int(self._examined.positions[index]))
        position = self._examined.seen + index - looked_at
        record = self._read(position)
        if prompt_key(record.prompt) in self._foreign:
            where = self._examined.files.where(position)
            raise RowError("held-out", f"{where}: its prompt is also held out, so it is not trained")
        return record

    def _read(self, position: int) -> Record:
        return self._columns.record(*self._examined.files.read(position))


class Dataset:
    """What the recipe's `task.data` names. Raises DataError when it is opened."""

    def __init__(self, data: DataSource, *, section: str = "task.data") -> None:
        self._data = data
        self._section = section
        self._columns = Columns(data.prompt, data.answer, data.id, data.tools, section)
        self._shared = 0
        self._document: dict[str, Any] = {}
        train = self._opened(data.train, "train")
        if data.heldout is None:
            held = held_out(train.prompts, section=section)
            train, heldout = train.only(~held), train.only(held)
            foreign = heldout.prompts
        else:
            heldout = self._opened(data.heldout, "heldout")
            train = self._without_leaks(train, heldout)
            foreign = heldout.prompts if data.leaks != "warn" else heldout.prompts[:0]
        self.train: Sequence[Record] = Side(train, self._columns, unseen=train.unseen, foreign=foreign)
        self.heldout: Sequence[Record] = Side(heldout, self._columns, unseen=0, foreign=foreign[:0])

    @cached_property
    def document(self) -> dict[str, Any]:
        """What was read and what was left out; JSON."""
        return {
            "train": len(self.train),
            "heldout": len(self.heldout),
            "shared_prompts": self._shared,
            "files": self._document,
        }

    def line(self) -> str:
        """The same for a person, in one line."""
        sides = f"data: {len(self.train):,} rows to train, {len(self.heldout):,} held out"
        found = self._document.values()
        left_out = sum(reason["rows"] for side in found for reason in side["left_out"].values())
        repeated = sum(side["duplicates"] for side in found)
        contradicted = sum(side["contradictory"] for side in found)
        unseen = sum(side["unseen"] for side in found)
        counts = {
            "left out": left_out,
            "repeated": repeated,
            "prompts with several answers": contradicted,
            "held-out prompts also in train": self._shared,
            "looked at when they are read": unseen,
        }
        return "; ".join([sides, *(f"{count:,} {what}" for what, count in counts.items() if count)])

    def _opened(self, given: str | Sequence[str], side: str) -> Examined:
        files = open_files(given, self._data.format, key=f"{self._section}.{side}")
        bad = BadRows(self._data.bad_rows, key=f"{self._section}.bad_rows")
        examined = examine(files, self._columns, bad)
        repeated, several = examined.repeated, examined.contradicting
        self._document[side] = {
            "files": files.described(),
            "unseen": examined.unseen,
            "left_out": bad.document(),
            "duplicates": len(repeated),
            "contradictory": len(several),
        }
        if len(several):
            one, other = several[0].tolist()
            log.warning(
                "%s: %d prompts have more than one answer, as %s and %s: if one is right, the others teach against it",
                *(files.paths[0], len(several), files.where(one), files.where(other)),
            )
        if not len(repeated):
            return examined
        one, other = repeated[0].tolist()
        said = (
            f"{files.paths[0]}: {len(repeated)} rows have prompt and answer of an earlier one, as {files.where(other)} "
            f"of {files.where(one)}"
        )
        if self._data.duplicates == "error":
            raise DataError(f"{said}: remove them, or say what becomes of them: {self._section}.duplicates=drop (keep)")
        if self._data.duplicates == "keep":
            log.warning("%s: they are trained as often as they stand there", said)
            return examined
        log.warning("%s: they are left out", said)
        return examined.only(~np.isin(examined.positions, repeated[:, 1]))

    def _without_leaks(self, train: Examined, heldout: Examined) -> Examined:
        """The rows to train, as `leaks` says of prompts that are also held out."""
        leaking = np.isin(train.prompts, heldout.prompts)
        self._shared = len(np.unique(train.prompts[leaking]))
        if not self._shared:
            return train
        first = int(train.positions[leaking][0])
        said = (
            f"{self._shared} held-out prompts of {heldout.files.paths[0]} also occur in {train.files.paths[0]}, the "
            f"first at {train.files.where(first)}"
        )
        if self._data.leaks == "error":
            raise DataError(f"{said}: remove them there, or have it done: {self._section}.leaks=drop")
        if self._data.leaks == "warn":
            log.warning("%s: held-out success will look too good (%s.leaks=drop)", said, self._section)
            return train
        if leaking.all():
            raise DataError(f"{said}, and no row is left to train: give other rows as {self._section}.heldout")
        log.warning("%s: %d rows are left out there", said, int(leaking.sum()))
        return train.only(~leaking)
