"""Why am I waiting: everyone who waits now, for what, since when, and who could end it. From one snapshot.

Three sources: what the store knows (`Stats.blocked`), what collectors say of themselves in their beats (engines,
weights on their way, evaluations), and the silence of those that do not beat any more.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import psutil

from asyncrl.buffers.base import Blocked, MemberStats, Stats
from asyncrl.buffers.limits import Limits
from asyncrl.telemetry.table import aligned, visible
from asyncrl.telemetry.text import duration

SILENT_S = 6.0
"""A collector beats every two seconds, or more often: three missed beats are named, long before it is given up."""

IN_MESSAGE = 6
"""Rows of the table where it is part of an error: enough to see who is late, short enough for the end of a log."""

HEAD = ("who", "waits for", "since", "who can end it")


def blocked_parties(stats: Stats, limits: Limits) -> list[Blocked]:
    """Everyone who waits, the longest first; [] once the run has ended."""
    if stats.phase == "ended":
        return []
    silent = {member.name for member in stats.members if member.beat_age_s > SILENT_S}
    found = [party for party in stats.blocked if party.who not in silent]  # what it asked last is not what it lacks
    for member in stats.members:
        found += [_silent(member, stats, limits)] if member.name in silent else _told(member)
    return sorted(found, key=lambda party: party.since)


def _silent(member: MemberStats, stats: Stats, limits: Limits) -> Blocked:
    left = limits.member_timeout_s - member.beat_age_s
    if not member.issued:
        then = ""
    elif left > 0:
        then = f"; in {left:.0f} s its tickets are given back"
    else:
        then = "; its tickets are given back at the next call of anyone"
    tickets = f"it has {member.issued} tickets" if member.issued else "it has no ticket"
    return Blocked(
        who=member.name,
        waits_for=f"a sign of life ({tickets})",
        since=stats.time - member.beat_age_s,
        unblocked_by=f"{process_of(member.progress)}{then}",
    )


def _told(member: MemberStats) -> list[Blocked]:
    """What a collector says it waits for: `collectors/waits.py`. A beat is another program's word: what is not of that
    form is left out rather than trusted."""
    told = member.progress.get("waits")
    found = []
    for wait in told if isinstance(told, Sequence) else ():
        match wait:
            case {"for": str(what), "since": float() | int() as since, "by": str(by)}:
                found.append(Blocked(member.name, what, float(since), by))
    return found


def process_of(told: Mapping[str, Any]) -> str:
    """A member's process, by the `info` of its last beat, and what this host sees of it if it runs here."""
    pid, host = told.get("pid"), told.get("host")
    if not isinstance(pid, int) or not isinstance(host, str):
        return "its process"
    state = process_state(pid, host)
    return f"its process, {pid} on {visible(host)}{', which ' + state if state else ''}"


def process_state(pid: int, host: str) -> str:
    """What is wrong with a process of this host: "is gone", "is stopped"; "" where it runs, or on another host."""
    if host != socket.gethostname():
        return ""
    try:
        status = psutil.Process(pid).status()  # type: ignore[no-untyped-call]
    except psutil.NoSuchProcess:
        return "is gone"
    if status == psutil.STATUS_ZOMBIE:
        return "is gone"
    return "is stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else ""


def blocked_table(stats: Stats, limits: Limits, *, more: Sequence[Blocked] = (), most: int | None = None) -> list[str]:
    """`blocked_parties`, and `more` that only the caller knows of, as `blocked_lines`."""
    parties = sorted([*blocked_parties(stats, limits), *more], key=lambda party: party.since)
    return blocked_lines(parties, now=stats.time, most=most)


def blocked_lines(blocked: Sequence[Blocked], *, now: float, most: int | None = None) -> list[str]:
    """The table, for a person; parties that wait for the same are one row. `now`: of the snapshot, unix seconds.
    `most`: rows shown, where the table is part of a message.

    >>> blocked_lines([], now=0.0)
    ['nobody waits']
    """
    if not blocked:
        return ["nobody waits"]
    together: dict[tuple[str, str], list[Blocked]] = {}
    for party in blocked:
        together.setdefault((party.waits_for, party.unblocked_by), []).append(party)
    rows = [
        (
            _names([party.who for party in parties]),
            visible(what),
            _since(min(party.since for party in parties), now),
            visible(by),
        )
        for (what, by), parties in together.items()
    ]
    lines = aligned([HEAD, *rows[:most]])
    left = 0 if most is None else max(0, len(rows) - most)
    return [*lines, f"... and {left} more: `asyncrl status`"] if left else lines


def _names(who: Sequence[str]) -> str:
    names = [visible(name) for name in dict.fromkeys(who)]
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _since(since: float, now: float) -> str:
    """How long, and the local time of day at which it began."""
    return f"{duration(max(0.0, now - since))} ({datetime.fromtimestamp(since):%H:%M:%S})"
