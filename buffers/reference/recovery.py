"""A store that lost its newest writes, or all of them, is told by a learner what its weights contain. Contract, 5: a
commit whose reply was lost is safe to repeat, also when the store has forgotten the lease."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncrl.buffers.base import BufferError, Commit, State
from asyncrl.buffers.reference.common import TicketState
from asyncrl.buffers.reference.ledger import Ledger
from asyncrl.staleness import Weights


class Recovery(Ledger):
    """Adopt and recommit."""

    def adopt(self, forks: Mapping[int, Weights]) -> None:
        for lineage, origin in forks.items():
            known = self.tree.forks.get(lineage)
            if known is not None and known != tuple(origin):
                raise BufferError(f"lineage {lineage} forked from {known} in this store, not from {tuple(origin)}")
        missing = {lineage: tuple(origin) for lineage, origin in forks.items() if lineage not in self.tree.forks}
        if not missing:
            return
        here = Weights(self.lineage, self.version)
        self.tree.forks.update({lineage: (origin[0], origin[1]) for lineage, origin in missing.items()})
        self.lineage = max(self.lineage, *missing)
        while not self.tree.is_ancestor(here, self.lineage):
            here = self._before_it(here)
        self._start_rewind(here.version)

    def _before_it(self, here: Weights) -> Weights:
        """The next older weights that could lie on the new path: where the path left this lineage, or its parent."""
        limit = self.tree.last_of(here.lineage, self.lineage)
        return Weights(here.lineage, limit) if limit is not None else Weights(*self.tree.forks[here.lineage])

    def recommit(self, lineage: int, step: int, tickets: Sequence[tuple[int, int]]) -> Commit:
        if not self.tree.is_ancestor(Weights(lineage, step), self.lineage):
            self._check_lineage(lineage)
        if self.commits.get(step) == lineage and step < self.version:
            return self._committed(repeated=True)
        if step != self.version or self.phase == "rewinding":
            raise BufferError(f"step {step} cannot be committed again: V is {self.version}, phase {self.phase}")
        if self.leased is not None:
            self._give_back(self.leased)
        # What collectors work on is not what this store thinks, and what they have handed in it may not know: they join
        # again.
        self._wake_members()
        for member in list(self.members.values()):
            self._forget(member, "rewind", lost=False)
        for ordinal, attempt in sorted(tickets):
            while self.next_ordinal <= ordinal:  # those between were issued in what the store has lost
                self.all[self.next_ordinal] = TicketState(self.next_ordinal, State.RETURNED)
                self.returned.add(self.next_ordinal)
                self.next_ordinal += 1
            self._use_again(self.all.get(ordinal), attempt, Weights(lineage, step))
        self._move_to(step + 1, lineage)
        # Groups that are as old as the store: what cannot be trained in time any more is generated again.
        self.sweep_dues = {}
        for live in sorted(self.live):
            self._rewind(self.all[live])
        return self._committed(repeated=False)

    def _use_again(self, ticket: TicketState | None, attempt: int, use: Weights) -> None:
        if ticket is None or use in ticket.uses:
            return  # settled, or recorded
        if ticket.state is State.HELD and ticket.attempt == attempt:
            self._owe(self._owed(ticket)[:1], -1)
            ticket.state = State.LEASED
            self._use(ticket, use, skipped=False)
            return
        if ticket.state not in (State.RETURNED, State.ISSUED, State.HELD):
            self.reasons[f"{ticket.state}/{ticket.reason}"] -= 1
            if self.kept.pop(ticket.ordinal, None) is not None:
                self.kept_bytes -= ticket.size
                ticket.size = 0
        self._tell_owner(ticket)
        self._leave_live(ticket)
        self.returned.discard(ticket.ordinal)
        self.payload.pop(ticket.ordinal, None)
        ticket.attempt, ticket.header, ticket.size, ticket.left = attempt, None, 0, 0
        ticket.uses.append(use)
        self._train(ticket)
