"""A learner starts: fence the old one at once, then rewind in bounded pieces, safe to repeat. Contract, 7."""

from __future__ import annotations

from asyncrl.buffers.base import BufferError, Limits, State
from asyncrl.buffers.reference.common import ROOT, SWEEP_CHUNK, TicketState
from asyncrl.buffers.reference.lease import Leases
from asyncrl.staleness import Weights, due, due_test


class Rewinds(Leases):
    """New lineages."""

    def new_lineage(self, parent: Weights | None, limits: Limits) -> int:
        """Fence in O(1); `sweep_chunk` then does the rest in bounded pieces."""
        origin = parent if parent is not None else ROOT
        if parent is not None:
            if not self.tree.is_ancestor(parent, self.lineage):
                raise BufferError(f"checkpoint {tuple(parent)} is not on the current branch (lineage {self.lineage})")
            if parent.version > self.version:
                raise BufferError(f"checkpoint of version {parent.version} lies beyond the run's V, {self.version}")
        # Held and leased bytes are of the old limits too; only the reservations change with the new group size.
        issued = sum(1 for t in self.live.values() if t.state is State.ISSUED)
        self._rebase_dues(limits.max_age)
        self.reserved = issued * limits.group_bytes
        self.limits = limits
        self.lineage += 1
        self.tree.forks[self.lineage] = (origin.lineage, origin.version)
        self.version, self.checkpoint = origin.version, origin.version
        self.phase, self.sweep, self.sweep_dues = "rewinding", 0, {}
        self.leased, self.next_lease_attempt, self.learner_waits, self.waiting = None, 0, False, None
        self.announced, self.evaluation, self.evaluation_claim, self.error = None, None, "", None
        for member in self.members.values():
            if member.serving is not None and not self.tree.is_ancestor(member.serving, self.lineage):
                member.serving = None
        return self.lineage

    def _rebase_dues(self, max_age: int) -> None:
        self.dues = {}
        for ticket in self.live.values():
            if ticket.state in (State.ISSUED, State.HELD):
                step = due(ticket.lo, max_age)
                self.dues[step] = self.dues.get(step, 0) + 1

    def sweep_chunk(self, lineage: int, now: float) -> bool:
        """One bounded piece of the rewind, by ordinal; True when the run goes on. Repeating it is harmless."""
        self._check_lineage(lineage)
        if self.sweep is None:
            return True
        end = min(self.next_ordinal, self.sweep + SWEEP_CHUNK)
        for ordinal in range(self.sweep, end):
            self._rewind(self.all[ordinal])
        self.sweep = end
        if end < self.next_ordinal:
            return False
        self.sweep, self.phase = None, "running"
        self._wake_members()
        self._grant(now)
        return True

    def _rewind(self, ticket: TicketState) -> None:
        if ticket.state is State.RETURNED:
            return
        if ticket.state is State.TRAINED:
            assert ticket.trained is not None
            if self.tree.is_ancestor(Weights(ticket.trained.lineage, ticket.trained.version + 1), self.lineage):
                return  # its use is in the surviving weights
            self.reasons[f"{State.TRAINED}/{ticket.reason}"] -= 1
            self._keep_or_return(ticket, kept=self.kept.pop(ticket.ordinal, None) is not None)
        elif ticket.state in (State.STALE, State.FILTERED, State.FAILED):
            assert ticket.ended_at is not None
            if self.tree.is_ancestor(ticket.ended_at, self.lineage):
                return
            self.reasons[f"{ticket.state}/{ticket.reason}"] -= 1
            self._return(ticket)
        elif ticket.state is State.ISSUED:
            goes_on = self.tree.is_ancestor(ticket.issued_for, self.lineage) and self._keeps(ticket)
            if not goes_on:
                self.wakes.add(f"nudge:{ticket.owner}")
                self._return(ticket)
        else:
            self._keep_or_return(ticket, kept=False)

    def _keep_or_return(self, ticket: TicketState, *, kept: bool) -> None:
        """A held, leased or undone trained ticket becomes held if its payload is there, every span survives and the
        bounds allow it; else it is returned."""
        header = ticket.header
        usable = (
            ticket.ordinal in self.payload
            and header is not None
            and all(self.tree.is_ancestor(s, self.lineage) for s in (*header.spans, header.weights))
            and header.newest <= self.version
        )
        if kept:
            self.kept_bytes -= ticket.size
            self.held_bytes += ticket.size
        if ticket.state is State.LEASED or ticket.state is State.TRAINED:
            ticket.state = State.LEASED  # counted in held bytes, in no due
            if usable and self._keeps(ticket):
                ticket.state, ticket.trained, ticket.ended_at, ticket.reason = State.HELD, None, None, ""
                self.live[ticket.ordinal] = ticket
                self._owe(due(ticket.lo, self.limits.max_age), 1)
            else:
                self._return(ticket)
        elif not (usable and self._keeps(ticket)):
            self._return(ticket)

    def _keeps(self, ticket: TicketState) -> bool:
        """Shed what the new B cannot train in time: in ordinal order, while the due test and (k + 1) x B allow."""
        step = due(ticket.lo, self.limits.max_age)
        owed = dict(self.sweep_dues)
        owed[step] = owed.get(step, 0) + 1
        if sum(owed.values()) > (self.limits.max_age + 1) * self.limits.groups_per_step:
            return False
        if sum(owed.values()) > (self.limits.max_steps - self.version) * self.limits.groups_per_step:
            return False
        if not due_test(owed, first_step=self.version, groups_per_step=self.limits.groups_per_step):
            return False
        self.sweep_dues = owed
        return True
