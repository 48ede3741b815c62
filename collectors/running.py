"""A ticket in work: its episodes, what came of them, and why it ends if it ends without a group."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from asyncrl.buffers.base import FailKind, Ticket
from asyncrl.collectors.episode import Episode
from asyncrl.collectors.seats import Seats
from asyncrl.rewards.scoring import Score


class TicketEnded(Exception):
    """Why a ticket's work ends without a group. `kind` None: it was revoked, there is nobody to tell."""

    def __init__(self, kind: FailKind | None, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.kind: FailKind | None = kind
        self.reason = reason


@dataclass(slots=True, eq=False)
class Running:
    """A ticket in work."""

    ticket: Ticket
    episodes: tuple[Episode, ...]
    seats: Seats
    started: float = field(default_factory=time.monotonic)
    scores: list[Score] = field(default_factory=list)  # of the members that have ended
    ended: TicketEnded | None = None  # why it ends or ended without a group; set once
    tokens_at_end: int = 0
    task: asyncio.Task[None] | None = None
    begun: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return (self.ticket.ordinal, self.ticket.attempt)

    @property
    def tokens(self) -> int:
        """Sampled so far by all members."""
        return self.seats.tokens

    def end(self, why: TicketEnded) -> None:
        """End the work from outside. Its task sees `ended`; one that has not run yet looks before it begins, because
        cancelled now it would never run at all, and nobody would tell the store."""
        if self.ended is None:
            self.ended, self.tokens_at_end = why, self.tokens
            if self.begun and self.task is not None:
                self.task.cancel()
