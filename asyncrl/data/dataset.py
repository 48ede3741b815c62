"""Questions and answers out of a recipe's files: opened, looked at, split, and read row by row.

Nothing of a row stays in memory: what is held is 8 bytes of each row that was looked at. See `examined` for how much
that is, and `docs/data.md` for what this means to rows of very large files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from asyncrl.data.bad_rows import BadRows
from asyncrl.data.errors import DataError, RowError
from asyncrl.data.examined import Examined, examine
from asyncrl.data.files import open_files
from asyncrl.data.lengths import Tokens, measured
from asyncrl.data.rows import Columns, Record
from asyncrl.data.split import held_out, prompt_key

if TYPE_CHECKING:
    from asyncrl.config.recipe import DataSource


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
    """What the recipe's `data` names: both sides of the split, and what was found on the way. Raises DataError when it
    is opened.

    `warnings`: of rows that are left out or look wrong, one line each, for a person.
    """

    def __init__(self, data: DataSource, *, section: str = "task.data", tokens: Tokens | None = None) -> None:
        """section: of the recipe, whose keys are named. tokens: of prompts, by the model's tokenizer; None: rows that
        are too long for it are not looked for."""
        self._data = data
        self._tokens = tokens
        self._section = section
        self._columns = Columns(data.prompt, data.answer, data.id, data.tools, section)
        self._files: dict[str, dict[str, Any]] = {}
        self._shared = 0
        self.warnings: list[str] = []
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

    def document(self) -> dict[str, Any]:
        """What was read and what was left out; JSON."""
        return {
            "train": len(self.train),
            "heldout": len(self.heldout),
            "shared_prompts": self._shared,
            "read": self._files,
            "warnings": self.warnings,
        }

    def line(self) -> str:
        """The counts for a person, in one line: all that are not 0."""
        read = self._files.values()
        counts = {
            "left out": sum(reason["rows"] for files in read for reason in files["left_out"].values()),
            "repeated": sum(files["duplicates"] for files in read),
            "prompts with several answers": sum(files["contradictory"] for files in read),
            "held-out prompts also in train": self._shared,
            "looked at when they are read": sum(files["unseen"] for files in read),
            "counted in tokens when they are asked": sum(files["uncounted"] for files in read),
        }
        sides = f"{len(self.train):,} rows to train, {len(self.heldout):,} held out"
        return "; ".join([sides, *(f"{what}: {count:,}" for what, count in counts.items() if count)])

    def _opened(self, given: str | Sequence[str], side: str) -> Examined:
        files = open_files(given, self._data.format, key=f"{self._section}.{side}")
        bad = BadRows(self._data.bad_rows, key=f"{self._section}.bad_rows", logs=False)
        examined, uncounted = examine(files, self._columns, bad), 0
        # Before the tokenizer has its say, which not every host has.
        digest = examined.digest(drops=self._data.duplicates == "drop")
        if self._tokens is not None:
            examined, uncounted = measured(examined, self._columns, self._tokens, bad)
        self._files[side] = {
            "files": files.described(),
            "digest": digest,
            "unseen": examined.unseen,
            "uncounted": uncounted,
            "left_out": bad.document(),
            "duplicates": len(examined.repeated),
            "contradictory": len(examined.contradicting),
        }
        self.warnings += files.warnings
        self.warnings += [f"left out ({reason}): {first}" for reason, first in bad.examples.items()]
        if several := len(examined.contradicting):
            one, other = (files.where(position) for position in examined.contradicting[0].tolist())
            self.warnings.append(
                f"{files.paths[0]}: prompts with several answers: {several}, as {one} and {other}; if one is right, "
                "the others teach against it"
            )
        return self._without_repeats(examined)

    def _without_repeats(self, examined: Examined) -> Examined:
        """The rows that are used, as `duplicates` says of those that repeat an earlier one."""
        if not len(examined.repeated):
            return examined
        files = examined.files
        first, later = (files.where(position) for position in examined.repeated[0].tolist())
        said = (
            f"{files.paths[0]}: rows with prompt and answer of an earlier one: {len(examined.repeated)}, as {later} of "
            f"{first}"
        )
        if self._data.duplicates == "error":
            raise DataError(f"{said}; remove them, or have it done: {self._section}.duplicates=drop")
        if self._data.duplicates == "keep":
            self.warnings.append(f"{said}; each is trained as often as it stands there ({self._section}.duplicates)")
            return examined
        self.warnings.append(f"{said}; they are left out")
        return examined.only(~np.isin(examined.positions, examined.repeated[:, 1]))

    def _without_leaks(self, train: Examined, heldout: Examined) -> Examined:
        """The rows to train, as `leaks` says of prompts that are also held out."""
        leaking = np.isin(train.prompts, heldout.prompts)
        self._shared = len(np.unique(train.prompts[leaking]))
        if not self._shared:
            return train
        said = (
            f"held-out prompts of {heldout.files.paths[0]} that also occur in {train.files.paths[0]}: {self._shared}, "
            f"as {train.files.where(int(train.positions[leaking][0]))}"
        )
        if self._data.leaks == "error":
            raise DataError(f"{said}; remove them there, or have it done: {self._section}.leaks=drop")
        if self._data.leaks == "warn":
            self.warnings.append(f"{said}; held-out success will look too good ({self._section}.leaks=drop)")
            return train
        if leaking.all() and not train.unseen:
            raise DataError(f"{said}; no row is left to train: give other rows as {self._section}.heldout")
        self.warnings.append(f"{said}; left out there: {int(leaking.sum())} rows")
        return train.only(~leaking)
