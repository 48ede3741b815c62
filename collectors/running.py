"""A ticket in work: its requests, what came of them, and why it ends if it ends without a group."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from asyncrl.buffers.base import FailKind, Ticket
from asyncrl.collectors.engines.base import Completion, Engine, Request
from asyncrl.collectors.fleet import Host
from asyncrl.rewards.pool import Score
from asyncrl.staleness import Weights


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
    host: Host
    engine: Engine  # of the host when it began: a restarted one knows nothing of it
    requests: tuple[Request, ...]
    touched: set[Weights]  # served while its requests decoded: its spans are among them
    started: float = field(default_factory=time.monotonic)
    sampled: dict[str, int] = field(default_factory=dict)  # finished request -> tokens
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
        running = (r.id for r in self.requests if r.id not in self.sampled)
        return sum(self.sampled.values()) + sum(self.host.entrance.progress(self.engine, id) for id in running)

    async def generate(self, request: Request) -> Completion:
        """The answer to one of its requests. Raises what the engine raises."""
        return await self.host.entrance.generate(self.engine, request)

    def end(self, why: TicketEnded) -> None:
        """End the work from outside. Its task sees `ended`; one that has not run yet looks before it begins, because
        cancelled now it would never run at all, and nobody would tell the store."""
        if self.ended is None:
            self.ended, self.tokens_at_end = why, self.tokens
            if self.begun and self.task is not None:
                self.task.cancel()
