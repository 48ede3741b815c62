"""A run in which no group at all can be used: it would generate for half an hour before anybody was told."""

from __future__ import annotations

from pathlib import Path

from asyncrl.buffers.base import State, Stats

STEPS = 2
"""So many steps' worth of groups, all failed and none usable, are no bad luck but a task that cannot work."""

CAUSES = 3
"""Kinds of failure whose first cause is shown."""

SAID_BY = " WARNING asyncrl.rewards.scoring: "
"""The verifiers log the first failure of each kind, with its cause."""


def nothing_usable(stats: Stats, *, groups_per_step: int) -> str:
    """What became of the first groups if every one of them failed, "" as long as there is hope."""
    done = {state: stats.states.get(state, 0) for state in State if state not in (State.RETURNED, State.ISSUED)}
    failed = done.pop(State.FAILED)
    if failed < STEPS * groups_per_step or any(done.values()):
        return ""
    reasons = (f"{reason} {n}" for reason, n in stats.reasons.items() if n)
    return f"not one of the first {failed} groups could be used: {', '.join(reasons)}"


def causes(log: Path) -> list[str]:
    """The first failure of each kind, as a collector's log has it."""
    with log.open(errors="replace") as lines:
        return [line.partition(SAID_BY)[2].rstrip() for line in lines if SAID_BY in line][:CAUSES]
