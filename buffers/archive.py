"""The archive: what was trained, one Parquet part per step, so that every claim can be checked with any tool.

A part is named `step-<lineage>-<step>.parquet`, where `step` is the version the step started from, and holds the groups
in the order they were trained, with the columns `trained_lineage` and `trained_version` added. It is written before
the commit and overwritten when the step is done again, so that a trained ticket always has its part; a part without a
commit (the learner died in between) is cut off by the next lineage, which starts at or before that step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.buffers.archive_ledger import ArchiveLedger
from asyncrl.buffers.parquet import write_whole
from asyncrl.schema import apart, check_schema, together, validate
from asyncrl.staleness import Weights, age

_PART = re.compile(r"step-(\d{4,})-(\d{6,})\.parquet")


class Stretch(NamedTuple):
    """Steps first_step..last_step (both included) of one lineage. A branch is a list of these, oldest first."""

    lineage: int
    first_step: int
    last_step: int


Branch = Sequence[tuple[int, int, int]]

ADDED = ("trained_lineage", "trained_version")
"""Columns of a part beside the record's."""


class Archive:
    """The parts of one run in one folder. Readers may open it while a learner writes: a part appears whole or not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def ledger(self) -> ArchiveLedger:
        """Rows of tickets that have left the store."""
        return ArchiveLedger(self.folder / "ledger")

    def write(self, lineage: int, step: int, batches: Sequence[pa.RecordBatch]) -> Path:
        """Write the part of a step, over an older try of the same step; on return it survives a power failure. Call it
        before the commit."""
        table = together(batches)
        for name, value in zip(ADDED, (lineage, step), strict=True):
            table = table.append_column(name, pa.array(np.full(table.num_rows, value, np.int32)))
        path = self._path(Weights(lineage, step))
        # No dictionaries: of tokens and log-probs, which repeat little, they double the time and the size.
        write_whole(table, path, use_dictionary=False)
        return path

    def _path(self, step: Weights) -> Path:
        return self.folder / f"step-{step.lineage:04d}-{step.version:06d}.parquet"

    def _existing(self, step: Weights) -> Path:
        path = self._path(step)
        if not path.exists():
            raise FileNotFoundError(f"{self.folder}: no part of lineage {step.lineage} step {step.version}")
        return path

    def parts(self) -> dict[Weights, Path]:
        """Every part, dead ones too, by (lineage, step), ascending."""
        found = {}
        for path in self.folder.glob("step-*.parquet"):
            if match := _PART.fullmatch(path.name):
                found[Weights(int(match[1]), int(match[2]))] = path
        return dict(sorted(found.items()))

    def branch(self, version: int | None = None) -> list[Stretch]:
        """The surviving branch: a lineage's first part cuts off all older lineages from that step on.

        `version`: the ledger's V. Parts of that step or later are not committed, or are of a branch that a new lineage
        has cut off without having written a part yet. Left out, the names of the parts are all there is to go by.
        """
        return surviving(name for name in self.parts() if version is None or name.version < version)

    def branch_parts(self, branch: Branch | None = None) -> list[Path]:
        """Paths of a branch's parts, by step. Raises FileNotFoundError that names the first missing step."""
        parts, chosen = self.parts(), self.branch() if branch is None else branch
        wanted = [Weights(lineage, step) for lineage, first, last in chosen for step in range(first, last + 1)]
        for name in wanted:
            if name not in parts:
                raise FileNotFoundError(f"{self.folder}: no part of lineage {name.lineage} step {name.version}")
        return [parts[name] for name in wanted]

    def tickets(self, step: Weights) -> list[tuple[int, int]]:
        """(ordinal, attempt) of each group that a step (lineage, version it started from) trained, in that order.

        Raises FileNotFoundError that names the step if it has no part."""
        path = self._existing(step)
        rows = pq.read_table(path, columns=["ticket", "attempt"]).to_pydict()
        return list(dict.fromkeys(zip(rows["ticket"], rows["attempt"], strict=True)))

    def groups(self, step: Weights) -> list[pa.RecordBatch]:
        """The groups that a step (lineage, version it started from) trained, in that order, as its learner had them.

        Raises FileNotFoundError that names the step if it has no part, ValueError that names the file if that is
        damaged, of another schema, or holds what a learner would refuse."""
        path = self._existing(step)
        try:
            table = pq.read_table(path)
            check_schema(table.schema)
            rows = pa.concat_batches(table.drop_columns(list(ADDED)).to_batches())
            groups = apart(rows)
            for group in groups:
                validate(group)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error
        return groups

    def stamps(self, step: Weights) -> set[tuple[Weights, str]]:
        """Which weights sampled what a step trained, each with the checksum that its collector stamped on the row.

        Raises FileNotFoundError that names the step if it has no part."""
        rows = pq.read_table(self._existing(step), columns=["spans"])["spans"].to_pylist()
        return {(Weights(span["lineage"], span["version"]), span["checksum"]) for row in rows for span in row}

    def table(self, branch: Branch | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """Rows of a branch (left out: the surviving one), by step and in the order trained; `columns` limits what is
        read. An archive without parts gives a ValueError."""
        paths = self.branch_parts(branch)
        if not paths:
            raise ValueError(f"{self.folder}: no part, nothing was trained")
        tables = [pq.read_table(path, columns=columns) for path in paths]
        return pa.concat_tables(tables, promote_options="default")

    def trained(self, branch: Branch | None = None, *, masked_beyond: int | None = None) -> Trained:
        """What the archive proves about a branch, one part in memory at a time. masked_beyond: the age, in versions,
        beyond which the learner left tokens out (the policy `mask`)."""
        result = Trained(masked_beyond)
        columns = ["loss_mask", "versions", "ticket", "trained_lineage", "trained_version"]
        for path in self.branch_parts(branch):
            result.add(pq.read_table(path, columns=columns))
        return result


@dataclass(slots=True)
class Trained:
    """Ages, uses and order, recomputed from nothing but parts of the archive."""

    masked_beyond: int | None = None
    tokens_by_age: dict[int, int] = field(default_factory=dict)  # age in versions -> trained tokens
    masked: int = 0  # tokens that were too old
    all_masked: list[tuple[int, Weights]] = field(default_factory=list)  # ticket, and the step that found all too old
    max_age: int | None = None  # None: no token
    uses: dict[int, list[Weights]] = field(default_factory=dict)  # ticket -> the (lineage, step) that trained it
    order: list[tuple[Weights, tuple[int, ...]]] = field(default_factory=list)  # tickets of each step, as trained

    def add(self, part: pa.Table) -> None:
        """Count one part in: columns loss_mask, versions, ticket, trained_lineage, trained_version."""
        part = part.combine_chunks()
        step = Weights(part["trained_lineage"][0].as_py(), part["trained_version"][0].as_py())
        mask = part["loss_mask"].chunk(0).flatten().to_numpy()
        versions = part["versions"].chunk(0).flatten().to_numpy()
        for version, tokens in zip(*np.unique(versions[mask == 1], return_counts=True), strict=True):
            of = age(step.version, int(version))
            if self.masked_beyond is not None and of > self.masked_beyond:
                self.masked += int(tokens)
                continue
            self.tokens_by_age[of] = self.tokens_by_age.get(of, 0) + int(tokens)
            self.max_age = of if self.max_age is None else max(self.max_age, of)
        tickets = tuple(dict.fromkeys(part["ticket"].to_pylist()))
        self.order.append((step, tickets))
        if self.masked_beyond is not None:
            of_token = np.repeat(part["ticket"].to_numpy(), np.diff(part["loss_mask"].chunk(0).offsets.to_numpy()))
            left = set(of_token[(mask == 1) & (versions >= step.version - self.masked_beyond)].tolist())
            self.all_masked += [(ticket, step) for ticket in tickets if ticket not in left]
        for ticket in tickets:
            self.uses.setdefault(ticket, []).append(step)


def branch_to(weights: Weights, forks: Mapping[int, tuple[int, int]]) -> list[Stretch]:
    """The steps that made `weights`, given where each lineage forked: each lineage from there to where its child did.

    The root lineage 0 trains nothing.

    >>> branch_to(Weights(2, 4), {1: (0, 0), 2: (1, 3)})
    [Stretch(lineage=1, first_step=0, last_step=2), Stretch(lineage=2, first_step=3, last_step=3)]
    """
    branch: list[Stretch] = []
    lineage, end = weights
    while lineage > 0:
        parent, forked = forks[lineage]
        if forked < end:
            branch.append(Stretch(lineage, forked, end - 1))
        lineage, end = parent, min(end, forked)
    return branch[::-1]


def surviving(steps: Iterable[Weights]) -> list[Stretch]:
    """The branch that the newest of these (lineage, step) pairs lie on, each lineage's own steps being contiguous.

    >>> surviving([Weights(1, 0), Weights(1, 1), Weights(1, 2), Weights(2, 2), Weights(3, 1)])
    [Stretch(lineage=1, first_step=0, last_step=0), Stretch(lineage=3, first_step=1, last_step=1)]
    """
    ends: dict[int, tuple[int, int]] = {}
    for lineage, step in steps:
        first, last = ends.get(lineage, (step, step))
        ends[lineage] = (min(first, step), max(last, step))
    branch: list[Stretch] = []
    cut: int | None = None
    for lineage in sorted(ends, reverse=True):
        first, last = ends[lineage]
        if cut is not None:
            last = min(last, cut - 1)
        if first <= last:
            branch.append(Stretch(lineage, first, last))
        cut = first if cut is None else min(cut, first)
    return branch[::-1]
