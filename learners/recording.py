"""A run as its folder tells it: which steps led to its present weights, what made their bits, and what it left of them.

Two things say which weights the run had: the checkpoints it kept, and the checksum of the served weights that a
collector stamped into every row it sampled with them. So nearly every version has left a trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asyncrl.buffers.archive import Archive, Stretch, branch_to
from asyncrl.config.recipe import Recipe
from asyncrl.learners import checkpoint as checkpoints
from asyncrl.learners.arithmetic import differences, machine, settings
from asyncrl.learners.checkpoint import Checkpoint
from asyncrl.staleness import Weights
from asyncrl.telemetry.metrics import Record, read_metrics


class ReplayError(Exception):
    """The run cannot be replayed: what is missing or was changed, and what to do."""


@dataclass(frozen=True, slots=True)
class Recording:
    """branch: the steps that led to the present weights. kept: version -> checkpoint on that branch. budgets: tokens of
    a step's micro-batches. notes: a line each on why the same bits might not come out although nothing was changed."""

    folder: Path
    branch: Sequence[Stretch]
    forks: Mapping[int, tuple[int, int]]
    kept: Mapping[int, Checkpoint]
    budgets: Mapping[Weights, int]
    notes: Sequence[str]

    @property
    def archive(self) -> Archive:
        return Archive(self.folder / "archive")

    def steps(self, start: int) -> list[Weights]:
        """(lineage, version it started from) of every step from version `start` on, in order."""
        every = (Weights(lineage, step) for lineage, first, last in self.branch for step in range(first, last + 1))
        return [step for step in every if step.version >= start]

    def start(self, version: int) -> Checkpoint | None:
        """The checkpoint from which steps can be made again from `version` on; None for 0, the initial weights.

        Raises ReplayError: there is none of that version, or no step after it."""
        if version and version not in self.kept:
            kept = ", ".join(str(version) for version in sorted(self.kept)) or "none"
            raise ReplayError(f"{self.folder} has no checkpoint of version {version} to start from; it has: {kept}")
        if not self.steps(version):
            raise ReplayError(f"{self.folder} has trained no step from version {version} on: nothing to replay")
        return self.kept[version] if version else None

    def stamps(self, start: int) -> dict[int, set[str]]:
        """Version -> checksums of the weights by which trained rows were sampled, out of the steps from `start` on. A
        version that was published without one (`weights.verify_every`) has left none.

        Raises ReplayError that names the first missing part, and versions from which nothing is missing."""
        found: dict[int, set[str]] = {}
        for step in self.steps(start):
            try:
                for weights, checksum in self.archive.stamps(step):
                    if checksum:
                        found.setdefault(weights.version, set()).add(checksum)
            except FileNotFoundError as error:
                later = [version for version in sorted(self.kept) if version > step.version and self.steps(version)]
                way = f"; --from {later[0]} replays from the checkpoint after it" if later else ""
                raise ReplayError(f"{error}{way}") from None
        return found


def read_recording(folder: Path, recipe: Recipe) -> Recording:
    """What the run folder says. `recipe`: the one that lies in it now.

    Raises ReplayError: nothing was trained, or not by that recipe."""
    records = _records(folder / "metrics.jsonl")
    starts = _starts(folder / "metrics.jsonl", records)
    forks = {start["lineage"]: (start["parent"][0], start["version"]) for start in starts}
    sound, _ = checkpoints.survey(folder / "checkpoints")
    newest = max(forks)
    reached = [step.version + 1 for step in Archive(folder / "archive").parts() if step.lineage == newest]
    reached += [checkpoint.weights.version for checkpoint in sound if checkpoint.weights.lineage == newest]
    branch = branch_to(Weights(newest, max(reached, default=forks[newest][1])), forks)
    ends = {lineage: last + 1 for lineage, _, last in branch}
    kept = {of.weights.version: of for of in sound if of.weights.version <= ends.get(of.weights.lineage, -1)}
    on_branch = [start for start in starts if start["lineage"] in ends]
    _check_recipe(folder / "recipe.yaml", recipe, on_branch)
    budgets = {
        Weights(record["lineage"], record["version"] - 1): record["tokens_per_microbatch"]
        for record in records
        if "tokens_per_microbatch" in record
    }
    notes = _notes(recipe, on_branch)
    return Recording(folder=folder, branch=branch, forks=forks, kept=kept, budgets=budgets, notes=notes)


def _records(path: Path) -> list[Record]:
    try:
        return read_metrics(path)
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise ReplayError(str(error)) from None


def _starts(path: Path, records: Sequence[Record]) -> list[Record]:
    """The start event of every lineage."""
    starts = [record for record in records if record.get("event") == "start"]
    if not starts:
        raise ReplayError(f"{path} tells of no learner's start: there is nothing to replay")
    if any("settings" not in start for start in starts):
        raise ReplayError(f"{path} does not say by which settings the run was trained: an older asyncrl wrote it")
    return starts


def _check_recipe(path: Path, recipe: Recipe, starts: Sequence[Record]) -> None:
    now = settings(recipe)
    for start in starts:
        then: dict[str, Any] = start["settings"]
        if changed := differences(then, now):
            what = "; ".join(f"{key} is {now.get(key)}, it was {then.get(key)}" for key in changed)
            raise ReplayError(f"{path} was changed after lineage {start['lineage']} had trained by it: {what}")


def _notes(recipe: Recipe, starts: Sequence[Record]) -> list[str]:
    notes = [] if recipe.run.deterministic else ["run.deterministic was false: the same bits are not promised"]
    here = machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"), ranks=1)
    for start in starts:
        then: dict[str, Any] = start["machine"]
        if changed := differences(then, here):
            what = ", ".join(f"{key} {then.get(key)}, here {here.get(key)}" for key in changed)
            notes.append(f"lineage {start['lineage']} was trained by another machine ({what}): bits may differ")
    return notes
