"""A run as Python sees it: what lies in its folder, as values instead of files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from asyncrl.buffers.archive import Archive
from asyncrl.runtime.folder import RunFolderError
from asyncrl.staleness import Lineages
from asyncrl.telemetry.metrics import Record, read_metrics, surviving_steps
from asyncrl.telemetry.text import number


@dataclass(frozen=True, slots=True)
class Run:
    """One run. Every attribute is read from `folder` (absolute) when it is asked for, also while the run goes on.

    Raises RunFolderError where the run has not come so far as to write what is asked for.
    """

    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        """What it came to: steps, seconds, success before and after, losses, places (summary.json, written last)."""
        try:
            summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_bytes())
        except FileNotFoundError:
            raise RunFolderError(f"{self.folder} has no summary.json: the run has not ended in order") from None
        return summary

    @property
    def metrics(self) -> pa.Table:
        """One row per step that led to the present weights, one column per name of `docs/metrics.md`.

        A nested value is a struct (`by_age`: struct of struct) with every key that any step has, null in the others;
        `.flatten()` makes it columns, `.to_pandas()` a data frame.
        """
        return table(surviving_steps(self._records()))

    @property
    def events(self) -> list[Record]:
        """What happened between steps, in order: start, eval, checkpoint, end."""
        return [record for record in self._records() if "event" in record]

    @property
    def checkpoint(self) -> Path:
        """The folder of the newest checkpoint, which transformers loads."""
        written = [Path(record["path"]) for record in self.events if record["event"] == "checkpoint"]
        if not written:
            raise RunFolderError(f"{self.folder} has no checkpoint yet")
        return self.folder / "checkpoints" / written[-1].name  # the folder may have been moved

    @property
    def archive(self) -> Archive:
        """Every trained group: `.archive.table()` has a row per trajectory, with tokens, versions, reward parts."""
        return Archive(self.folder / "archive")

    @property
    def ledger(self) -> pa.Table:
        """What became of every ticket that no resumed learner can reach any more, in a row each; the store has the
        others. Columns as in `docs/record.md`."""
        starts = [event for event in self.events if event["event"] == "start"]
        if any("lineage" not in start for start in starts):
            raise RunFolderError(f"{self.folder} is of `asyncrl sft`, which has no tickets")
        tree = Lineages({start["lineage"]: (start["parent"][0], start["version"]) for start in starts})
        newest = max((start["lineage"] for start in starts), default=0)
        return self.archive.ledger.table(lambda weights: tree.is_ancestor(weights, newest))

    def __repr__(self) -> str:
        if not (self.folder / "summary.json").exists():
            return f"Run({str(self.folder)!r}: not ended)"
        summary = self.summary
        if "heldout_loss" in summary:  # of `asyncrl sft`
            loss = " -> ".join(number(summary[name]) for name in ("heldout_loss_before", "heldout_loss"))
            return f"Run({str(self.folder)!r}: {summary['step']} steps, held-out loss {loss})"
        success = " -> ".join(number(summary.get(name)) for name in ("success_before", "success_after"))
        return f"Run({str(self.folder)!r}: {summary['steps']} steps, success {success})"

    def _records(self) -> list[Record]:
        path = self.folder / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []


def table(records: list[Record]) -> pa.Table:
    """Records as a table: the columns are the names in order of first appearance; a record without one has null."""
    names = dict.fromkeys(name for record in records for name in record)
    return pa.table({name: _column([record.get(name) for record in records]) for name in names})


def _column(values: list[Any]) -> pa.Array:
    # A mapping without a key in any step (nothing was lost) would be a struct without fields, which Parquet refuses.
    if all(value is None or value == {} for value in values):
        return pa.nulls(len(values))
    return pa.array(values)
