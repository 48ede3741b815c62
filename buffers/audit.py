"""The audit: does the ledger add up, and does the archive say the same? From rows and parts, never from counters alone.

Checked in one atomic snapshot of the store: every ordinal has one row, in the store or in the archive's ledger; the
sums follow from the rows; whatever is held has its payload. Against the archive's surviving branch: what the rows call
trained has been trained by exactly those steps, as often as allowed, within the age bound, and nothing else has been.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from asyncrl.buffers.archive import Archive, Stretch, Trained, branch_to
from asyncrl.buffers.archive_ledger import Settled
from asyncrl.buffers.base import FORFEITED, LIVE, Buffer, State, Stats, TicketRow
from asyncrl.buffers.limits import Limits
from asyncrl.staleness import Lineages, Weights, due_test, in_window, promised

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
        if moved := sum(stats.archived.values()):
            found.append(f"{moved} of them have moved to the archive's ledger")
        if self.trained is not None:
            ages = ", ".join(f"{age}: {n}" for age, n in sorted(self.trained.tokens_by_age.items()))
            masked = f", {self.trained.masked} masked" if self.trained.masked else ""
            found.append(f"archive: {len(self.trained.order)} steps, trained tokens by age {{{ages}}}{masked}")
        found += [f"PROBLEM {problem}" for problem in self.problems]
        found.append("clean" if not self.problems else f"{len(self.problems)} problems")
        return found


async def audit(buffer: Buffer, archive: Archive | None) -> Report:
    """Audit a run, live or ended. Without an archive (it lies on the learner's host) only the store is checked."""
    stats, rows = await buffer.snapshot()
    report = Report(stats, None)
    report.problems += ledger_problems(stats, rows, buffer.limits)
    if archive is None:
        return report
    tree = Lineages({lineage: (origin.lineage, origin.version) for lineage, origin in stats.forks.items()})
    moved = archive.ledger.read(lambda weights: tree.is_ancestor(weights, stats.lineage))
    report.problems += [*moved.problems, *moved_problems(stats, rows, moved.rows)]
    try:
        bound = buffer.limits.max_age if buffer.limits.over_age == "mask" else None
        report.trained = archive.trained(branch_of(stats), masked_beyond=bound)
    except FileNotFoundError as error:
        report.problems.append(f"archive: {error}")
    else:
        report.problems += archive_problems(rows, moved.rows, report.trained, buffer.limits)
    return report


def branch_of(stats: Stats) -> list[Stretch]:
    """The steps that made the current weights."""
    return branch_to(Weights(stats.lineage, stats.version), stats.forks)


def ledger_problems(stats: Stats, rows: Sequence[TicketRow], limits: Limits) -> list[str]:
    """Whether the store's sums follow from its rows, and what is promised is there."""
    problems = []
    moved = sum(stats.archived.values())
    ordinals = [row.ordinal for row in rows]
    if ordinals != sorted(set(ordinals)) or len(rows) + moved != stats.tickets:
        problems.append(
            f"{stats.tickets} tickets were issued, the ledger has {len(rows)} rows and {moved} in the archive"
        )
    states = Counter(str(row.state) for row in rows)
    for key, count in stats.archived.items():
        states[key.partition("/")[0]] += count
    problems += _differences("tickets in state", {str(s): stats.states[s] for s in State}, states)
    reasons = Counter(f"{row.state}/{row.reason}" for row in rows if row.state not in LIVE) + Counter(stats.archived)
    counted = {key: count for key, count in stats.reasons.items() if not key.startswith(FORFEITED)}
    problems += _differences("tickets ended as", counted, reasons)
    problems += _due_problems(stats, rows, limits)
    sizes = {
        "held": sum(row.size for row in rows if row.state in (State.HELD, State.LEASED)),
        "kept": sum(row.size for row in rows if row.state is State.TRAINED),
        "reserved": states[str(State.ISSUED)] * limits.group_bytes,
    }
    bytes_counted = {"held": stats.bytes_held, "kept": stats.bytes_kept, "reserved": stats.bytes_reserved}
    problems += _differences("bytes", bytes_counted, sizes)
    problems += _named("is held without its group", [r for r in rows if r.size > 0 and not r.has_payload])
    problems += _named("has a group nobody will fetch", [r for r in rows if r.size == 0 and r.has_payload])
    return problems


def _due_problems(stats: Stats, rows: Sequence[TicketRow], limits: Limits) -> list[str]:
    """Whether what is owed is what live tickets owe, and can be trained in time where the policy promises it."""
    owed: Counter[int] = Counter()
    owing = [(row, row.lo) for row in rows if row.lo is not None]  # those at work, held and leased
    for row, lo in owing:
        left = promised(lo, limits.max_age, row.left, used=bool(row.uses), fresh_per_step=limits.fresh_per_step)
        owed.update(left[1:] if row.state is State.LEASED else left)
    problems = _differences("uses due at step", stats.dues, owed)
    if stats.phase != "running" or limits.over_age != "wait":
        return problems
    first = stats.version + (1 if stats.states[State.LEASED] else 0)
    if not due_test(stats.dues, first_step=first, groups_per_step=limits.groups_per_step):
        problems.append(f"dues {dict(sorted(stats.dues.items()))} cannot all be trained in time from step {first} on")
    expired = [row for row, lo in owing if not in_window(lo, version=stats.version, max_age=limits.max_age)]
    return problems + _named("expired under `wait`", expired)


def moved_problems(stats: Stats, rows: Sequence[TicketRow], moved: Mapping[int, Settled]) -> list[str]:
    """Whether each ticket that is not in the store is in the archive's ledger, as the store remembers it, and what is
    in both is the same."""
    here = {row.ordinal: Settled.of(row) for row in rows}
    missing = [ordinal for ordinal in range(stats.tickets) if ordinal not in here and ordinal not in moved]
    problems = [f"ticket {n} is neither in the store nor in the archive's ledger" for n in missing[:SHOWN]]
    if len(missing) > SHOWN:
        problems.append(f"... and {len(missing) - SHOWN} more")
    left = Counter(f"{row.state}/{row.reason}" for n, row in moved.items() if n < stats.tickets and n not in here)
    problems += _differences("tickets that moved to the archive as", stats.archived, left)
    for ordinal, row in sorted(moved.items()):
        # What this store has not issued, and was not trained, it will issue: it has lost its data since.
        if ordinal >= stats.tickets and row.uses:
            problems.append(f"ticket {ordinal} is {row} in the archive's ledger, the store never issued it")
        elif ordinal in here and row.denied_by(here[ordinal]):
            problems.append(f"ticket {ordinal} is {row} in the archive's ledger, {here[ordinal]} in the store")
    return problems


def archive_problems(
    rows: Sequence[TicketRow], moved: Mapping[int, Settled], trained: Trained, limits: Limits
) -> list[str]:
    """Whether the archive's surviving branch is what the rows say was trained."""
    problems = []
    if trained.max_age is not None and trained.max_age > limits.max_age:
        problems.append(f"archive: a trained token is {trained.max_age} versions old, the bound is {limits.max_age}")
    problems += [
        f"ticket {ordinal} was over age, every token of it, when it was trained ({_steps([step])})"
        for ordinal, step in trained.all_masked
    ]
    ledger = {ordinal: row.uses for ordinal, row in moved.items()} | {row.ordinal: row.uses for row in rows}
    for ordinal, steps in sorted(trained.uses.items()):
        told = tuple(sorted(ledger.get(ordinal, ()), key=lambda use: use.version))
        if len(steps) > limits.max_uses:
            problems.append(f"ticket {ordinal} is trained {len(steps)} times in the surviving weights: {_steps(steps)}")
        elif told != tuple(steps):
            problems.append(
                f"ticket {ordinal} is trained in the archive ({_steps(steps)}), "
                f"the ledger says {_steps(told) or 'it is not'}"
            )
    problems += [
        f"ticket {ordinal} is trained in the ledger ({_steps(uses)}), the archive has no such row"
        for ordinal, uses in sorted(ledger.items())
        if uses and ordinal not in trained.uses
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
