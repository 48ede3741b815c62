"""What a collector hands back: a group, or the news that there is none. Contract, section 3."""

from __future__ import annotations

from asyncrl.buffers.base import TERMINAL, FailKind, GroupHeader, Member, PutResult, State
from asyncrl.buffers.reference.common import TicketState, Work
from asyncrl.buffers.reference.tickets import Tickets
from asyncrl.staleness import in_window


class Puts(Tickets):
    """Put and fail."""

    def put(self, member: Member, header: GroupHeader, payload: bytes) -> PutResult | None:
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
        work = Work.of(header)
        edge = header.newest if self.limits.over_age == "mask" else header.oldest
        if not usable or header.newest > self.version:
            self._return(ticket, "rewind", work)
        elif not self._keeps_promise(ticket, header):
            self._return(ticket, "promise", work)
        elif len(payload) > self.limits.group_bytes:
            self._end(ticket, State.FAILED, "too_large", work)
        elif not in_window(edge, version=self.version, max_age=self.limits.max_age):
            self._over_age(ticket, work)
        else:
            self._hold(ticket, header, payload)
        ticket.answer = "ended" if ticket.state in TERMINAL else "held" if ticket.state is State.HELD else "returned"
        self._grant()
        return ticket.answer

    def _hold(self, ticket: TicketState, header: GroupHeader, payload: bytes) -> None:
        left = ticket.left
        self._leave_live(ticket)
        ticket.state, ticket.header, ticket.size, ticket.left = State.HELD, header, len(payload), left
        ticket.times["put"] = self.clock
        self.live[ticket.ordinal] = ticket
        self.payload[ticket.ordinal] = payload
        self.held_bytes += ticket.size
        self._owe(self._owed(ticket), 1)
        self.group_times.append(self.now - ticket.began)
        self.filtered_in_row = 0
        self._wake_learner()

    def fail(
        self,
        member: Member,
        ordinal: int,
        attempt: int,
        kind: FailKind,
        reason: str,
        work: Work,
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
            state = State.FAILED if kind == "data" else State.FILTERED
            self._end(ticket, state, reason, work)
            self.filtered_in_row += kind == "filtered"
        else:
            self._take_back(ticket, kind, lost=kind == "infrastructure", work=work)
        ticket.answer = "returned" if ticket.state is State.RETURNED else "ended"
        self._grant()
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
