"""The audit: does the ledger add up, and does the archive say the same? From rows and parts, never from counters alone.

Checked in one atomic snapshot of the store: every ordinal has one row in one of eight states; the sums follow from the
rows; whatever is held has its payload. Against the archive's surviving branch: a ticket the ledger calls trained has
been trained exactly there, once, within the age bound, and nothing else has been trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from asyncrl.buffers.archive import Archive, Stretch, Trained, branch_to
from asyncrl.buffers.base import LIVE, Buffer, Limits, State, Stats, TicketRow
from asyncrl.staleness import Weights, due, due_test, in_window

Key = TypeVar("Key")

SHOWN = 5  # examples of one kind of problem that are named


@dataclass(slots=True)
class Report:
    """What was found. `problems` is empty where everything adds up."""

    stats: Stats
    trained: Trained | None
    problems: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For a person: the sums, the ages, then every problem."""
        stats = self.stats
        found = [
            f"run {stats.run}: {stats.phase}, lineage {stats.lineage}, version {stats.version}",
            f"{stats.tickets} tickets = " + " + ".join(f"{stats.states[s]} {s}" for s in State),
        ]
        found += [f"  {reason}: {count}" for reason, count in sorted(stats.reasons.items())]
        if self.trained is not None:
            ages = ", ".join(f"{age}: {n}" for age, n in sorted(self.trained.tokens_by_age.items()))
            found.append(f"archive: {len(self.trained.order)} steps, trained tokens by age {{{ages}}}")
        found += [f"PROBLEM {problem}" for problem in self.problems]
        found.append("clean" if not self.problems else f"{len(self.problems)} problems")
        return found


async def audit(buffer: Buffer, archive: Archive | None) -> Report:
    """Audit a run, live or ended. Without an archive (it lies on the learner's host) only the store is checked."""
    stats, rows = await buffer.snapshot()
    report = Report(stats, None)
    report.problems += ledger_problems(stats, rows, buffer.limits)
    if archive is not None:
        try:
            report.trained = archive.trained(branch_of(stats))
        except FileNotFoundError as error:
            report.problems.append(f"archive: {error}")
        else:
            report.problems += archive_problems(rows, report.trained, buffer.limits)
    return report


def branch_of(stats: Stats) -> list[Stretch]:
    """The steps that made the current weights."""
    return branch_to(Weights(stats.lineage, stats.version), stats.forks)


def ledger_problems(stats: Stats, rows: Sequence[TicketRow], limits: Limits) -> list[str]:
    """Whether the sums follow from the rows and what is promised is there."""
    problems = []
    if [row.ordinal for row in rows] != list(range(stats.tickets)):
        problems.append(f"{stats.tickets} tickets were issued, the ledger has {len(rows)} rows")
    states = Counter(row.state for row in rows)
    problems += _differences("tickets in state", {s: stats.states[s] for s in State}, states)
    reasons = Counter(f"{row.state}/{row.reason}" for row in rows if row.state not in LIVE)
    problems += _differences("tickets ended as", stats.reasons, reasons)
    owing = [row for row in rows if row.state in (State.ISSUED, State.HELD) and row.lo is not None]
    dues = Counter(due(row.lo, limits.max_age) for row in owing if row.lo is not None)
    problems += _differences("tickets due at step", stats.dues, dues)
    sizes = {
        "held": sum(row.size for row in rows if row.state in (State.HELD, State.LEASED)),
        "kept": sum(row.size for row in rows if row.state is State.TRAINED),
        "reserved": states[State.ISSUED] * limits.group_bytes,
    }
    counted = {"held": stats.bytes_held, "kept": stats.bytes_kept, "reserved": stats.bytes_reserved}
    problems += _differences("bytes", counted, sizes)
    problems += _named("is held without its group", [r for r in rows if r.size > 0 and not r.has_payload])
    problems += _named("has a group nobody will fetch", [r for r in rows if r.size == 0 and r.has_payload])
    if stats.phase == "running" and limits.over_age == "wait":
        first = stats.version + (1 if states[State.LEASED] else 0)
        if not due_test(dues, first_step=first, groups_per_step=limits.groups_per_step):
            problems.append(f"dues {dict(sorted(dues.items()))} cannot all be trained in time from step {first} on")
        expired = [
            row
            for row in owing
            if row.lo is not None and not in_window(row.lo, version=stats.version, max_age=limits.max_age)
        ]
        problems += _named("expired under `wait`", expired)
    return problems


def archive_problems(rows: Sequence[TicketRow], trained: Trained, limits: Limits) -> list[str]:
    """Whether the archive's surviving branch is what the ledger says was trained."""
    problems = []
    if trained.max_age is not None and trained.max_age > limits.max_age:
        problems.append(f"archive: a trained token is {trained.max_age} versions old, the bound is {limits.max_age}")
    ledger: dict[int, Weights | None] = {row.ordinal: row.trained for row in rows if row.state is State.TRAINED}
    for ordinal, uses in sorted(trained.uses.items()):
        if len(uses) > 1:
            problems.append(f"ticket {ordinal} is trained {len(uses)} times in the surviving weights: {_steps(uses)}")
        elif ledger.get(ordinal) != uses[0]:
            problems.append(
                f"ticket {ordinal} is trained in the archive ({_steps(uses)}), the ledger says {ledger.get(ordinal)}"
            )
    problems += [
        f"ticket {ordinal} is trained in the ledger {where}, the archive has no such row"
        for ordinal, where in sorted(ledger.items())
        if ordinal not in trained.uses
    ]
    return problems


def _steps(uses: Sequence[Weights]) -> str:
    return ", ".join(f"lineage {use.lineage} step {use.version}" for use in uses)


def _differences(what: str, counted: Mapping[Key, int], found: Mapping[Key, int]) -> list[str]:
    keys = {**counted, **found}
    return [
        f"{what} {key}: the store counts {counted.get(key, 0)}, the rows give {found.get(key, 0)}"
        for key in sorted(keys, key=str)
        if counted.get(key, 0) != found.get(key, 0)
    ]


def _named(what: str, rows: Sequence[TicketRow]) -> list[str]:
    shown = [f"ticket {row.ordinal} ({row.state}) {what}" for row in rows[:SHOWN]]
    return shown + ([f"... and {len(rows) - SHOWN} more"] if len(rows) > SHOWN else [])
