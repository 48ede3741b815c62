"""How the ledger reads for a person: `asyncrl buffer status`, `ls`, `head`, and what is known of one ticket. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncrl.buffers.base import LIVE, State, Stats, TicketRow
from asyncrl.buffers.limits import Limits
from asyncrl.runtime.inspection import Found
from asyncrl.runtime.weights_text import named
from asyncrl.staleness import Candidate, age, choose_batch, due
from asyncrl.telemetry import text
from asyncrl.telemetry.table import aligned, visible
from asyncrl.telemetry.ticket import moments_of, timeline


def next_step(stats: Stats) -> int:
    """The version that the step after the leased one starts from: V, or V + 1 while a batch is being trained."""
    return stats.version + (1 if stats.states[State.LEASED] else 0)


# --- status -----------------------------------------------------------------------------------------------------------


def status_lines(stats: Stats, limits: Limits, *, aside: Sequence[str] = ()) -> list[str]:
    """The sums, ages, window, bytes and members of one snapshot. `aside`: "ordinal:attempt" of the groups that were set
    aside and are still there, the newest few."""
    live = stats.states[State.ISSUED] + stats.states[State.HELD] + stats.states[State.LEASED]
    step = next_step(stats)
    ages = {str(age(step, last - limits.max_age)): n for last, n in stats.dues.items() if n}
    full = (limits.max_age + 1) * limits.groups_per_step
    used = stats.bytes_held + stats.bytes_reserved + stats.bytes_kept
    facts = [
        run_fact(stats, limits),
        ("tickets", f"{stats.tickets} = " + " + ".join(f"{stats.states[state]} {state}" for state in State)),
        ("ended as", text.reasons(stats.reasons, separator="  ")),
        ("went back", text.reasons(stats.returns, separator="  ")),
        ("ages", f"{_ages(ages)} (issued and held groups, at the next step; at most {limits.max_age})"),
        (
            "window",
            f"{live} of {full} groups live: (max_trajectory_age {limits.max_age} + 1) x {limits.groups_per_step}",
        ),
        (
            "bytes",
            f"{text.count(used)} of {text.count(limits.max_bytes)}: {text.count(stats.bytes_held)} held, "
            f"{text.count(stats.bytes_reserved)} reserved with tickets, {text.count(stats.bytes_kept)} kept to rewind",
        ),
        (
            "rows",
            f"{stats.tickets - sum(stats.archived.values())} in the store, {sum(stats.archived.values())} archived",
        ),
        ("checkpoint", "none yet" if stats.checkpoint is None else f"version {stats.checkpoint}"),
    ]
    if stats.quarantined:
        kept = f"; kept: ticket:attempt {', '.join(map(visible, aside))}" if aside else ""
        facts.append(("set aside", f"{stats.quarantined} damaged or foreign groups{kept}"))
    if stats.refused_puts:
        facts.append(("refused", f"{stats.refused_puts} puts of attempts that were no longer wanted"))
    return [*aligned(facts), "", *member_lines(stats, limits), *error_lines(stats)]


def run_fact(stats: Stats, limits: Limits) -> tuple[str, str]:
    """Where the run is."""
    failed = " with an error" if stats.error else ""
    return (
        f"run {stats.run}",
        f"{stats.phase}{failed}, version {stats.version} of {limits.max_steps}, lineage {stats.lineage}",
    )


def error_lines(stats: Stats) -> list[str]:
    """What ended a run that failed; a stalled one's has the table of who waited."""
    if not stats.error:
        return []
    return ["", *(visible(line) for line in f"it failed: {stats.error}".splitlines())]


def _ages(ages: Mapping[str, int]) -> str:
    return "  ".join(f"{key}: {ages[key]}" for key in sorted(ages, key=int)) or "none"


def member_lines(stats: Stats, limits: Limits) -> list[str]:
    """A row for each collector that the store knows. One that was given up is known no more."""
    if not stats.members:
        lost = stats.returns.get("member_lost", 0)
        return ["no collector is connected" + (f"; {lost} tickets came back from lost ones" if lost else "")]
    rows = [("collector", "serves", "tickets", "tokens/s", "last beat", "")]
    for member in stats.members:
        rate = member.progress.get("tokens_per_s")
        rows.append(
            (
                visible(member.name),
                named(member.serving),
                str(member.issued),
                text.count(rate) if isinstance(rate, int | float) else "-",
                f"{member.beat_age_s:.1f} s ago",
                "" if member.alive else f"given up: silent for more than {limits.member_timeout_s:.0f} s",
            )
        )
    return aligned(rows)


# --- rows -------------------------------------------------------------------------------------------------------------

ROW_HEAD = ("ticket", "state", "reason", "attempt", "collector", "from version", "trained by", "bytes", "for")


def row_lines(rows: Sequence[TicketRow], *, now: float) -> list[str]:
    """Ledger rows, one a line. `now`: of the snapshot, unix seconds."""
    return aligned([ROW_HEAD, *(_row(row, now) for row in rows)])


def _row(row: TicketRow, now: float) -> tuple[str, ...]:
    return (
        str(row.ordinal),
        row.state.value,
        visible(row.reason) or "-",
        str(row.attempt),
        visible(row.owner) or "-",
        "-" if row.lo is None else str(row.lo),
        " ".join(map(named, row.uses)) or named(row.trained),
        text.count(row.size) if row.size else "-",
        text.duration(now - max(row.times.values())) if row.times else "-",
    )


# --- head -------------------------------------------------------------------------------------------------------------


def head_lines(
    stats: Stats, limits: Limits, live: Sequence[TicketRow], *, returned: TicketRow | None = None
) -> list[str]:
    """What the next lease chooses from, and why it has to wait, if it has to. `live`: all issued and held rows;
    `returned`: the one that is issued again next.

    Decides as the store does, by `staleness.choose_batch`.
    """
    if stats.phase == "ended":
        return ["the run has ended: there is no next step"]
    step = next_step(stats)
    candidates = [_candidate(row) for row in live]
    more = stats.states[State.RETURNED] > 0 or stats.states[State.ISSUED] > 0
    choice = choose_batch(
        candidates,
        version=step,
        max_age=limits.max_age,
        groups_per_step=limits.groups_per_step,
        lookahead=limits.lookahead,
        guard_dues=limits.over_age == "wait",
        more_to_come=more or limits.max_tickets is None or stats.tickets < limits.max_tickets,
        returned=None if returned is None else returned.ordinal,
    )
    visible_now = max(limits.groups_per_step, int(limits.lookahead * limits.groups_per_step))
    rows = [("ticket", "state", "collector", "from version", "age", "due", "for", "")]
    shown = [row for at, row in enumerate(live) if at < visible_now or row.ordinal in choice.batch]
    for row in shown:
        assert row.lo is not None, "issued and held rows have it"
        left = due(row.lo, limits.max_age) - step
        if row.ordinal in choice.batch:
            verdict = "in the batch"
        elif row.state is State.ISSUED:
            verdict = "waited for" if row.ordinal in choice.waiting_for else "still generated"
        else:
            verdict = "ready"
        rows.append(
            (
                str(row.ordinal),
                row.state.value,
                visible(row.owner) or "-",
                str(row.lo),
                str(age(step, row.lo)),
                _steps(left),
                text.duration(stats.time - max(row.times.values())) if row.times else "-",
                verdict,
            )
        )
    held = sum(row.state is State.HELD for row in live)
    about = (
        f"step {step + 1} trains {limits.groups_per_step} of the {visible_now} oldest live tickets; "
        f"{len(live)} are live, {held} of them ready"
    )
    if choice.batch:
        outcome = f"a batch of {len(choice.batch)} stands: no lease has to wait"
    elif live:
        outcome = "no batch stands" + _because(held, limits, choice.waiting_for)
    else:
        outcome = "nothing is issued or held"
    return [about, *aligned(rows), outcome]


def _candidate(row: TicketRow) -> Candidate:
    assert row.lo is not None, "issued and held rows have it"
    return Candidate(row.ordinal, held=row.state is State.HELD, lo=row.lo, uses=row.left)


def _steps(left: int) -> str:
    """Until a ticket is due, from the next step on."""
    return "next step" if left == 0 else f"{left} later"


def _because(held: int, limits: Limits, late: Sequence[int]) -> str:
    if held < limits.groups_per_step:
        return f": {held} ready of the {limits.groups_per_step} that a step trains"
    if limits.lookahead == 1 and late:
        return f": strictly in order (buffer.lookahead 1) come first {', '.join(map(str, late))}"
    return ": without the tickets waited for, some would be over age before they could be trained"


# --- one ticket -------------------------------------------------------------------------------------------------------


def ticket_lines(found: Found) -> list[str]:
    """What the ledger and the archive know of a ticket, and its timeline."""
    row = found.row
    facts: list[tuple[str, str]] = []
    if row is None and found.trained is None:
        facts.append((f"ticket {found.ordinal}", "its row has left the store for the archive's ledger"))
    elif row is None:
        facts.append((f"ticket {found.ordinal}", "trained"))
    else:
        why = f", {visible(row.reason)}" if row.reason and row.reason != row.state.value else ""
        facts.append((f"ticket {found.ordinal}", f"{row.state}{why}, attempt {row.attempt}"))
        if row.owner and row.state is State.ISSUED:
            facts.append(("generated by", visible(row.owner)))
        if row.losses or row.requeues:
            facts.append(("went back", f"{row.losses} collectors lost, {row.requeues} times over age"))
        if row.lo is not None and found.stats is not None and found.limits is not None:
            facts.append(("age", _age_now(row, found.stats, found.limits)))
    for use in (row.uses if row is not None else ()) or ((found.trained,) if found.trained else ()):
        facts.append(("trained by", f"the step from version {use.version} of lineage {use.lineage}"))
    if found.group is not None:
        task, row_id = (found.group.column(name)[0].as_py() for name in ("task", "row_id"))
        facts.append(("task", f"{visible(task)}, row {visible(row_id)}"))
        facts.append(("made by", _sampling(found)))
    if found.without:
        facts.append(("from", f"the archive alone: {found.without}"))
    return [*aligned(facts), "", *timeline(_moments(found))]


def _age_now(row: TicketRow, stats: Stats, limits: Limits) -> str:
    assert row.lo is not None, "the caller has looked"
    if row.state is State.LEASED:
        return f"{age(stats.version, row.lo)} in the step that trains it now, at most {limits.max_age}"
    step = next_step(stats)
    left = due(row.lo, limits.max_age) - step
    return f"{age(step, row.lo)} at the next step, at most {limits.max_age}; due {_steps(left)}"


NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
"""Settings that change nothing are not shown."""


def _sampling(found: Found) -> str:
    assert found.group is not None, "the caller has looked"
    collector, engine, sampling = (found.group.column(name)[0].as_py() for name in ("collector", "engine", "sampling"))
    del sampling["seed"]  # of one answer
    settings = ", ".join(f"{name} {value:g}" for name, value in sampling.items() if value != NEUTRAL.get(name))
    return f"{visible(collector)}, engine {visible(engine)}: {settings}"


def _moments(found: Found) -> dict[str, float]:
    """What the store and the collector know, in the order in which it happens."""
    own = {} if found.group is None else moments_of(found.group)
    times = {} if found.row is None else found.row.times
    moments = {
        "issued": times.get("issued", own.get("issued")),
        "first token": own.get("first token"),
        "done": own.get("done"),
        "scored": own.get("scored"),
        "put": times.get("put", own.get("put")),
        "leased": times.get("leased"),
    }
    state = State.TRAINED if found.row is None else found.row.state
    if state not in LIVE:
        moments[state.value] = times.get("ended", found.trained_at)
    return {name: at for name, at in moments.items() if at}
