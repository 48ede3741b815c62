"""Rows that no rewind can touch leave for the archive; the store keeps their sums. Contract, 8: terminal rows leave
once a checkpoint covers them."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.buffers.base import State
from asyncrl.buffers.reference.common import TicketState
from asyncrl.buffers.reference.lineage import Rewinds


class Ledger(Rewinds):
    """Settled and archived rows."""

    def settled(self, lineage: int, limit: int) -> list[TicketState]:
        self._check_lineage(lineage)
        found = [t for _, t in sorted(self.all.items()) if self._is_settled(t)]
        return found[:limit]

    def archived(self, lineage: int, ordinals: Sequence[int]) -> None:
        """Those that are not settled stay; those that have left already are passed over."""
        self._check_lineage(lineage)
        for ordinal in ordinals:
            ticket = self.all.get(ordinal)
            if ticket is None or not self._is_settled(ticket):
                continue
            del self.all[ordinal]
            key = f"{ticket.state}/{ticket.reason}"
            self.gone[key] = self.gone.get(key, 0) + 1
            self.gone_to = max(self.gone_to, self._made(ticket))

    def _is_settled(self, ticket: TicketState) -> bool:
        if ticket.state in (State.RETURNED, State.ISSUED, State.HELD, State.LEASED) or ticket.ordinal in self.kept:
            return False
        return self.phase != "rewinding" and self._made(ticket) <= self.covered

    def _made(self, ticket: TicketState) -> int:
        """The version from which on a rewind leaves this row as it is: step s made version s + 1."""
        assert ticket.ended_at is not None
        return ticket.ended_at.version + (1 if ticket.state is State.TRAINED else 0)
