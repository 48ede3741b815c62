"""Moves between ticket states. Each keeps four sums true: counts per state, dues, bytes, ownership."""

from __future__ import annotations

from asyncrl.buffers.base import State
from asyncrl.buffers.reference.common import ROOT, Common, TicketState
from asyncrl.staleness import Weights, due


class Transitions(Common):
    """What happens to one ticket."""

    def _leave_live(self, ticket: TicketState) -> None:
        """Undo what issued, held or leased had taken: room, dues, bytes, ownership."""
        if ticket.state in (State.ISSUED, State.HELD):
            self._owe(due(ticket.lo, self.limits.max_age), -1)
        if ticket.state is State.ISSUED:
            self.reserved -= self.limits.group_bytes
            if owner := self.members.get(ticket.owner):
                owner.owned.discard(ticket.ordinal)
        elif ticket.state in (State.HELD, State.LEASED):
            self.held_bytes -= ticket.size
        self.live.pop(ticket.ordinal, None)

    def _take_back(self, ticket: TicketState, *, lost: bool) -> None:
        """Issued -> returned, or failed as `poison` after it lost too many collectors."""
        if lost:
            ticket.losses += 1
            if ticket.losses >= self.limits.max_losses:
                self._end(ticket, State.FAILED, "poison")
                return
        self._return(ticket)

    def _return(self, ticket: TicketState) -> None:
        self._leave_live(ticket)
        self.payload.pop(ticket.ordinal, None)
        ticket.state, ticket.attempt, ticket.owner, ticket.owner_name = State.RETURNED, ticket.attempt + 1, "", ""
        ticket.header, ticket.trained, ticket.ended_at, ticket.reason, ticket.size = None, None, None, "", 0
        self.returned.add(ticket.ordinal)
        self._wake_learner()

    def _end(
        self, ticket: TicketState, state: State, reason: str, *, tokens: int | None = None, seconds: float = 0.0
    ) -> None:
        """To a terminal state other than trained. `tokens`, `seconds`: what was lost, as the caller knows it; else the
        held group's own, else the progress last reported (a lower bound)."""
        if tokens is None:
            tokens = ticket.header.tokens if ticket.header else ticket.progress
            seconds = ticket.header.seconds if ticket.header else 0.0
        self._leave_live(ticket)
        self.returned.discard(ticket.ordinal)
        self.payload.pop(ticket.ordinal, None)
        ticket.state, ticket.reason, ticket.ended_at = state, reason, Weights(self.lineage, self.version)
        ticket.size = 0
        key = f"{state}/{reason}"
        self.reasons[key] = self.reasons.get(key, 0) + 1
        self.lost_tokens[key] = self.lost_tokens.get(key, 0) + tokens
        self.lost_seconds[key] = self.lost_seconds.get(key, 0.0) + seconds
        if ticket.owner in self.members:
            self.wakes.add(f"nudge:{ticket.owner}")
        self._wake_learner()

    def _make_space(self, need: int) -> bool:
        """Payloads kept only for a rewind are given up first, oldest step first: they must never starve tickets."""
        for ordinal in sorted(self.kept, key=lambda n: ((self.kept[n].trained or ROOT).version, n)):
            if self.reserved + self.held_bytes + self.kept_bytes + need <= self.limits.max_bytes:
                return True
            self._drop_kept(ordinal)
        return self.reserved + self.held_bytes + self.kept_bytes + need <= self.limits.max_bytes

    def _drop_kept(self, ordinal: int) -> None:
        ticket = self.kept.pop(ordinal)
        self.kept_bytes -= ticket.size
        ticket.size = 0
        self.payload.pop(ordinal, None)
