"""Snapshots and rows as the store gives them."""

from __future__ import annotations

from typing import Any

from asyncrl.buffers.base import LIVE, MemberStats, State, Stats, TicketRow
from asyncrl.buffers.limits import Limits
from asyncrl.staleness import Weights

NOW = 1_000_000.0
LIMITS = Limits(max_age=1, groups_per_step=2, max_steps=60, member_timeout_s=30.0)


def stats(states: dict[State, int] | None = None, **changes: Any) -> Stats:
    counted = dict.fromkeys(State, 0) | (states or {})
    given: dict[str, Any] = {
        "run": "r",
        "phase": "running",
        "lineage": 1,
        "version": 12,
        "tickets": sum(counted.values()),
        "states": counted,
        "reasons": {},
        "lost_tokens": {},
        "lost_seconds": {},
        "refused_puts": 0,
        "bytes_reserved": 0,
        "bytes_held": 0,
        "bytes_kept": 0,
        "members": [],
        "waiting": None,
        "checkpoint": None,
        "forks": {1: Weights(0, 0)},
        "dues": {},
        "error": None,
        "returns": {},
        "lost_reward": {},
        "lost_length": {},
        "filtered_in_row": 0,
        "quarantined": 0,
        "archived": {},
        "blocked": (),
        "time": NOW,
    }
    return Stats(**{**given, **changes})


def member(name: str = "collector-0", *, beat_age_s: float = 0.5, **changes: Any) -> MemberStats:
    given: dict[str, Any] = {
        "name": name,
        "incarnation": f"{name}-1",
        "serving": Weights(1, 12),
        "checksum": "ab",
        "alive": beat_age_s <= LIMITS.member_timeout_s,
        "beat_age_s": beat_age_s,
        "issued": 0,
        "progress": {},
    }
    return MemberStats(**{**given, **changes})


def row(ordinal: int, state: State, lo: int | None = None, **changes: Any) -> TicketRow:
    given: dict[str, Any] = {
        "ordinal": ordinal,
        "state": state,
        "attempt": 0,
        "reason": "",
        "trained": None,
        "owner": "collector-0",
        "lo": lo,
        "has_payload": state is State.HELD,
        "size": 9_700 if state is State.HELD else 0,
        "left": 1 if state in LIVE else 0,
        "times": {"issued": NOW - 30},
    }
    return TicketRow(**{**given, **changes})
