"""What a collector hands back: a group, or the news that there is none. Contract, section 3."""

from __future__ import annotations

from asyncrl.buffers.base import FailKind, GroupHeader, Member, PutResult, State
from asyncrl.buffers.reference.common import TicketState
from asyncrl.buffers.reference.tickets import Tickets
from asyncrl.staleness import due, in_window


class Puts(Tickets):
    """Put and fail."""

    def put(self, member: Member, header: GroupHeader, payload: bytes, now: float) -> PutResult | None:
        """None: the run is rewinding, try again."""
        if self.phase == "rewinding":
            return None
        ticket = self.all.get(header.ordinal)
        if repeat := self._repeat(ticket, member, header.attempt):
            return repeat
        if ticket is None or not self._is_owner(ticket, member, header.attempt):
            self.refused_puts += 1
            return "refused"
        ticket.last = (member.incarnation, ticket.attempt)
        usable = all(self.tree.is_ancestor(s, self.lineage) for s in (*header.spans, header.weights))
        if not usable or not self._keeps_promise(ticket, header) or header.newest > self.version:
            self._return(ticket)
            ticket.answer = "returned"
        elif len(payload) > self.limits.group_bytes:
            self._end(ticket, State.FAILED, "too_large", tokens=header.tokens, seconds=header.seconds)
            ticket.answer = "ended"
        elif not in_window(header.oldest, version=self.version, max_age=self.limits.max_age):
            self._end(ticket, State.STALE, "over_age", tokens=header.tokens, seconds=header.seconds)
            ticket.answer = "ended"
        else:
            self._leave_live(ticket)
            ticket.state, ticket.header, ticket.size = State.HELD, header, len(payload)
            ticket.answer = "held"
            self.live[ticket.ordinal] = ticket
            self.payload[ticket.ordinal] = payload
            self.held_bytes += ticket.size
            self._owe(due(ticket.lo, self.limits.max_age), 1)
            self.group_times.append(now - ticket.issued)
            self._wake_learner()
        self._grant(now)
        return ticket.answer

    def fail(
        self,
        member: Member,
        ordinal: int,
        attempt: int,
        kind: FailKind,
        reason: str,
        tokens: int,
        seconds: float,
        now: float,
    ) -> PutResult | None:
        if self.phase == "rewinding":
            return None
        ticket = self.all.get(ordinal)
        if repeat := self._repeat(ticket, member, attempt):
            return repeat
        if ticket is None or not self._is_owner(ticket, member, attempt):
            self.refused_puts += 1
            return "refused"
        ticket.last = (member.incarnation, ticket.attempt)
        if kind in ("data", "filtered"):
            self._end(
                ticket, State.FAILED if kind == "data" else State.FILTERED, reason, tokens=tokens, seconds=seconds
            )
            ticket.answer = "ended"
        else:
            self._take_back(ticket, lost=kind == "infrastructure")
            ticket.answer = "returned" if ticket.state is State.RETURNED else "ended"
        self._grant(now)
        return ticket.answer

    def _keeps_promise(self, ticket: TicketState, header: GroupHeader) -> bool:
        """Not older than the version it was issued for: the due test at issue counted on that."""
        return header.oldest >= ticket.issued_for.version

    def _is_owner(self, ticket: TicketState, member: Member, attempt: int) -> bool:
        """The identity of a lease of work: right attempt, right incarnation, still issued. Without this guard a
        collector that was given up puts over its successor."""
        return ticket.state is State.ISSUED and ticket.attempt == attempt and ticket.owner == member.incarnation

    def _repeat(self, ticket: TicketState | None, member: Member, attempt: int) -> PutResult | None:
        """A put or fail whose reply was lost is answered as the first time, `held` as `duplicate`."""
        if ticket is None or ticket.last != (member.incarnation, attempt) or ticket.answer is None:
            return None
        return "duplicate" if ticket.answer == "held" else ticket.answer
