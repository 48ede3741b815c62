"""A ticket in work: its episodes, what came of them, and why it ends if it ends without a group."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncrl.buffers.base import FailKind, Ticket
from asyncrl.collectors.engines.base import Completion, Engine, Request
from asyncrl.collectors.episode import Episode, Sampler
from asyncrl.collectors.fleet import Fleet, Host
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
    episodes: tuple[Episode, ...]
    touched: set[Weights]  # served while its requests decoded: its spans are among them
    started: float = field(default_factory=time.monotonic)
    asked: dict[str, int] = field(default_factory=dict)  # request -> its tokens once it has ended, 0 before
    scores: list[Score] = field(default_factory=list)  # of the members that have ended
    ended: TicketEnded | None = None  # why it ends or ended without a group; set once
    tokens_at_end: int = 0
    task: asyncio.Task[None] | None = None
    begun: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return (self.ticket.ordinal, self.ticket.attempt)

    @property
    def ids(self) -> set[str]:
        """Of all its requests: the first one of each episode, and those that were asked since."""
        return {*(episode.id for episode in self.episodes), *self.asked}

    @property
    def tokens(self) -> int:
        """Sampled so far by all members."""
        return sum(n or self.host.entrance.progress(self.engine, id) for id, n in self.asked.items())

    def end(self, why: TicketEnded) -> None:
        """End the work from outside. Its task sees `ended`; one that has not run yet looks before it begins, because
        cancelled now it would never run at all, and nobody would tell the store."""
        if self.ended is None:
            self.ended, self.tokens_at_end = why, self.tokens
            if self.begun and self.task is not None:
                self.task.cancel()


class Seat(Sampler):
    """An episode's place at the engine of its group."""

    def __init__(self, group: Running, fleet: Fleet) -> None:
        self._group, self._fleet = group, fleet

    async def generate(self, request: Request) -> Completion:
        """See Sampler."""
        group = self._group
        group.asked[request.id] = 0
        group.host.decoding.add(request.id)  # the first one of an episode is reserved already
        try:
            completion = await group.host.entrance.generate(group.engine, request)
        finally:
            self._fleet.release(group.host, [request.id])
        group.asked[request.id] = len(completion.token_ids)
        group.host.restarts = 0
        return completion

    def partial(self, request_id: str) -> Completion | None:
        return self._group.engine.partial(request_id)

    def listen(self, request_id: str, heard: Callable[[], None]) -> None:
        self._group.engine.listen(request_id, heard)
