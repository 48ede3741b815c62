"""A learner starts: fence the old one at once, then rewind in bounded pieces, safe to repeat. Contract, 7."""

from __future__ import annotations

from asyncrl.buffers.base import BufferError, State
from asyncrl.buffers.limits import Limits
from asyncrl.buffers.reference.common import NOTHING, ROOT, SWEEP_CHUNK, TicketState
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
            if parent.version < self.gone_to:
                raise BufferError(
                    f"checkpoint of version {parent.version} is older than the oldest that was kept: ledger rows up to "
                    f"version {self.gone_to} have moved to the archive"
                )
        # Held and leased bytes are of the old limits too; only the reservations change with the new group size.
        issued = sum(1 for t in self.live.values() if t.state is State.ISSUED)
        self.limits = limits
        self.reserved = issued * limits.group_bytes
        self.lineage += 1
        self.tree.forks[self.lineage] = (origin.lineage, origin.version)
        if parent is None and self.gone:
            self._forget_the_gone()
        self._start_rewind(origin.version)
        return self.lineage

    def _forget_the_gone(self) -> None:
        """From the initial weights everything is generated again, also what had left for the archive's ledger."""
        for key, rows in self.gone.items():
            self.reasons[key] -= rows
        self.gone, self.gone_to, self.from_nothing = {}, 0, True

    def _start_rewind(self, version: int) -> None:
        self.version = self.checkpoint = self.covered = version
        self.phase, self.sweep, self.sweep_dues = "rewinding", 0, {}
        self.leased, self.next_lease_attempt, self.learner_waits, self.waiting = None, 0, None, None
        self.announced, self.evaluation, self.evaluation_claim, self.error = None, None, "", None
        self.filtered_in_row, self.moved_at = 0, None
        self.dues = {}
        for ticket in self.live.values():
            if ticket.state is State.LEASED:
                ticket.state = State.HELD  # its use was not recorded
            self._owe(self._owed(ticket), 1)
        for member in self.members.values():
            if member.serving is not None and not self.tree.is_ancestor(member.serving, self.lineage):
                member.serving = None

    def sweep_chunk(self, now_lineage: int) -> bool:
        """One bounded piece of the rewind, by ordinal; True when the run goes on. Repeating it is harmless."""
        self._check_lineage(now_lineage)
        if self.sweep is None:
            return True
        for ordinal in self._sweep_next():
            if ordinal not in self.all:
                self.all[ordinal] = TicketState(ordinal, State.RETURNED)
                self.returned.add(ordinal)
            self._rewind(self.all[ordinal])
            self.sweep = ordinal + 1
        if any(n >= self.sweep for n in self.all) or (self.from_nothing and self.sweep < self.next_ordinal):
            return False
        self.sweep, self.phase, self.from_nothing = None, "running", False
        self._trim_uses()
        self._wake_members()
        self._grant()
        return True

    def _sweep_next(self) -> list[int]:
        assert self.sweep is not None
        if self.from_nothing:
            return list(range(self.sweep, min(self.next_ordinal, self.sweep + SWEEP_CHUNK)))
        return sorted(n for n in self.all if n >= self.sweep)[:SWEEP_CHUNK]

    def _rewind(self, ticket: TicketState) -> None:
        if ticket.state is State.RETURNED:
            return
        if ticket.state is State.ISSUED:
            # It goes on if what it was issued for survives; the collector drops it if something newer was sampled.
            if not (self.tree.is_ancestor(ticket.issued_for, self.lineage) and self._keeps(ticket)):
                self._return(ticket, "rewind")
        elif ticket.state in (State.STALE, State.FILTERED, State.FAILED):
            assert ticket.ended_at is not None
            if not self.tree.is_ancestor(ticket.ended_at, self.lineage):
                self.reasons[f"{ticket.state}/{ticket.reason}"] -= 1
                self._return(ticket, "rewind", NOTHING)  # its work was lost when it ended
        else:
            self._rewind_group(ticket)

    def _rewind_group(self, ticket: TicketState) -> None:
        """Held or trained. Step s made version s + 1: a use survives if that version is on the branch. With every use
        undone, or some still owed, the group is held again if its payload is there, every span survives and the bounds
        allow it. Else it is generated again - unless a use of it survives: then that is all it gets."""
        surviving = [u for u in ticket.uses if self.tree.is_ancestor(Weights(u.lineage, u.version + 1), self.lineage)]
        undone = len(ticket.uses) - len(surviving)
        if ticket.state is State.TRAINED:
            if not undone:
                return
            self.reasons[f"{State.TRAINED}/{ticket.reason}"] -= 1
            if self.kept.pop(ticket.ordinal, None) is not None:
                self.kept_bytes -= ticket.size
            ticket.state, ticket.reason, ticket.ended_at, ticket.left = State.HELD, "", None, 0
            self.live[ticket.ordinal] = ticket
            self.held_bytes += ticket.size
        self._owe(self._owed(ticket), -1)
        ticket.left += undone
        ticket.uses = surviving
        self._owe(self._owed(ticket), 1)
        ticket.times.pop("ended", None)
        if self._usable(ticket) and self._keeps(ticket):
            return
        if surviving:
            self._forfeit(ticket, "rewind")
            self._train(ticket)
        else:
            self._return(ticket, "rewind")

    def _usable(self, ticket: TicketState) -> bool:
        header = ticket.header
        return (
            ticket.ordinal in self.payload
            and header is not None
            and all(self.tree.is_ancestor(s, self.lineage) for s in (*header.spans, header.weights))
            and header.newest <= self.version
        )

    def _keeps(self, ticket: TicketState) -> bool:
        """Shed what the new B cannot train in time: in ordinal order, while the due test and (k + 1) x B allow; a
        ticket that owes several uses may be left with fewer."""
        edge = self.edge(ticket)
        steps = min(self.limits.max_steps - 1, due(edge, self.limits.max_age)) - self.version + 1
        for uses in range(min(ticket.left, steps), 0, -1):
            owed = dict(self.sweep_dues)
            for step in self._promised(edge, uses, used=bool(ticket.uses)):
                owed[step] = owed.get(step, 0) + 1
            if self._fits(owed):
                self._owe(self._owed(ticket), -1)
                ticket.left = uses
                self._owe(self._owed(ticket), 1)
                self.sweep_dues = owed
                return True
        return False

    def _fits(self, owed: dict[int, int]) -> bool:
        total, B = sum(owed.values()), self.limits.groups_per_step
        if total > (self.limits.max_age + 1) * B or total > (self.limits.max_steps - self.version) * B:
            return False
        return due_test(owed, first_step=self.version, groups_per_step=B)
