"""The archive's ledger: rows of tickets whose fate is sealed, moved here so that the store keeps the live ones only.

A file is named `<lineage>-<version>-<n>.parquet` by the oldest checkpoint that was kept when it was written: its rows
are of tickets that ended before that version, and no learner goes on from an older one. So it holds as long as those
weights are ancestors of the run's, and is void once a run has begun again from its initial weights.

A row is written before it leaves the store. A learner that dies in between leaves it in both, and the next one writes
it a second time; it is one row all the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.buffers.base import State, TicketRow
from asyncrl.buffers.parquet import write_whole
from asyncrl.staleness import Weights

_NAME = re.compile(r"(\d{4,})-(\d{6,})-(\d{4,})\.parquet")
_WEIGHTS = pa.struct([("lineage", pa.int32()), ("version", pa.int32())])
TIMES = ("issued", "put", "leased", "ended")

SCHEMA = pa.schema(
    [
        ("ordinal", pa.int64()),
        ("state", pa.string()),
        ("reason", pa.string()),
        ("attempt", pa.int32()),
        ("uses", pa.list_(_WEIGHTS)),  # (lineage, step) of each step that trained it
        ("losses", pa.int32()),  # collectors it lost
        ("requeues", pa.int32()),  # times it was returned because it was over age
        *((name, pa.float64()) for name in TIMES),  # unix seconds, the store's clock; null: did not happen
    ]
)


class Settled(NamedTuple):
    """What became of a ticket."""

    state: State
    reason: str
    uses: tuple[Weights, ...]

    @classmethod
    def of(cls, row: TicketRow) -> Settled:
        return cls(row.state, row.reason, row.uses)

    def denied_by(self, newer: Settled) -> bool:
        """Whether both cannot be true. What ended untrained may be issued again, by a store that has lost its data;
        what was trained stays trained, by the same steps."""
        return bool(self.uses) and self.uses != newer.uses

    def __str__(self) -> str:
        steps = ", ".join(f"lineage {use.lineage} step {use.version}" for use in self.uses)
        return f"{self.state}/{self.reason}" + (f" ({steps})" if steps else "")


@dataclass(slots=True)
class Moved:
    """Rows of the archive's ledger by ordinal, and what is wrong with its files."""

    rows: dict[int, Settled] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class ArchiveLedger:
    """The files of one run in one folder. Readers may open it while a learner writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, covered: Weights, rows: Sequence[TicketRow]) -> Path:
        """Write settled rows; on return they survive a power failure. covered: the oldest checkpoint that is kept."""
        of_these = [number for path, name, number in self._files() if name == covered]
        number = max(of_these, default=-1) + 1  # never over another file: it may be of rows that have left the store
        path = self.folder / f"{covered.lineage:04d}-{covered.version:06d}-{number:04d}.parquet"
        write_whole(_table(rows), path, use_dictionary=True)
        return path

    def read(self, holds: Callable[[Weights], bool]) -> Moved:
        """Every row of the files whose checkpoint `holds`, newer files over older ones. Wrong with them is: one that
        cannot be read, and a ticket whose uses a newer one denies."""
        moved = Moved()
        for path, name, _ in self._files():
            if not holds(name):
                continue
            try:
                columns = pq.read_table(path, columns=["ordinal", "state", "reason", "uses"]).to_pydict()
            except (pa.ArrowException, OSError) as error:
                moved.problems.append(f"archive's ledger: {path.name} cannot be read: {error}")
                continue
            for ordinal, state, reason, uses in zip(*columns.values(), strict=True):
                row = Settled(State(state), reason, tuple(Weights(use["lineage"], use["version"]) for use in uses))
                older = moved.rows.get(ordinal)
                if older is not None and older.denied_by(row):
                    moved.problems.append(f"archive's ledger: ticket {ordinal} was {older}, {path.name} says {row}")
                moved.rows[ordinal] = row
        return moved

    def table(self, holds: Callable[[Weights], bool]) -> pa.Table:
        """The same rows with all columns, each ticket once, by ordinal."""
        tables = [pq.read_table(path) for path, name, _ in self._files() if holds(name)]
        if not tables:
            return SCHEMA.empty_table()
        whole = pa.concat_tables(tables).sort_by("ordinal")  # stable: of one ticket the newest row comes last
        ordinals = whole["ordinal"].to_numpy()
        last = np.append(ordinals[1:] != ordinals[:-1], [True])[: len(ordinals)]
        return whole.filter(pa.array(last))

    def _files(self) -> list[tuple[Path, Weights, int]]:
        """(path, checkpoint, n) of every file, in that order."""
        found = []
        for path in self.folder.glob("*.parquet"):
            if match := _NAME.fullmatch(path.name):
                found.append((path, Weights(int(match[1]), int(match[2])), int(match[3])))
        return sorted(found, key=lambda file: file[1:])


def _table(rows: Sequence[TicketRow]) -> pa.Table:
    columns = {
        "ordinal": [row.ordinal for row in rows],
        "state": [str(row.state) for row in rows],
        "reason": [row.reason for row in rows],
        "attempt": [row.attempt for row in rows],
        "uses": [[tuple(use) for use in row.uses] for row in rows],
        "losses": [row.losses for row in rows],
        "requeues": [row.requeues for row in rows],
        **{name: [row.times.get(name) for row in rows] for name in TIMES},
    }
    return pa.table(columns, schema=SCHEMA)
