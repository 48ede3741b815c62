"""Members, issue, and what time alone decides. Contract, section 2."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from asyncrl.buffers.base import BufferError, Member, State, Ticket
from asyncrl.buffers.reference.common import (
    CLOCK_STEP_S,
    SETTLE_S,
    STRAGGLER_FACTOR,
    STRAGGLER_FLOOR_S,
    MemberState,
    TicketState,
    Wait,
)
from asyncrl.buffers.reference.transitions import Transitions
from asyncrl.staleness import Weights, room


class Tickets(Transitions):
    """The collectors' side until a group is put."""

    def join(self, member: Member, info: Mapping[str, Any]) -> None:
        for other in [m for m in self.members.values() if m.member.name == member.name]:
            if other.member.incarnation != member.incarnation:
                self._forget(other, "member_lost", lost=True)
        if member.incarnation not in self.members:
            self.members[member.incarnation] = MemberState(member, beat_at=self.now, info=dict(info))
        self._grant()

    def leave(self, member: Member) -> None:
        if state := self.members.get(member.incarnation):
            self._forget(state, "left", lost=False)
            self._grant()

    def _forget(self, member: MemberState, why: str, *, lost: bool) -> None:
        del self.members[member.member.incarnation]
        self.waiters.pop(member.member.incarnation, None)
        if self.evaluation_claim == member.member.incarnation:
            self.evaluation_claim = ""
            self._wake_members()
        for ordinal in sorted(member.owned):
            self._take_back(self.all[ordinal], why, lost=lost)

    def tickets(self, member: Member, seq: int, want: int) -> list[Ticket] | Wait:
        state = self._member(member)
        self._expire()
        state = self._member(member)  # it may itself have been expired
        state.beat_at = self.now
        if seq < state.seq:
            raise BufferError(f"request {seq} of {member.name!r} comes after {state.seq}; numbers must grow")
        if seq > state.seq:
            state.seq, state.want, state.reply, state.asked = seq, want, (), self.clock
            self.waiters.pop(member.incarnation, None)
        if not self._granted(state) and state.want > 0:
            # Behind those who waited before: one path for old and new requests keeps the order fair. Also where a
            # grant was revoked (by a rewind) before its reply arrived: else this request would wait for ever.
            state.reply = ()
            self.waiters.setdefault(member.incarnation)
            self._grant()
        return self._granted(state) or Wait((), self._next_deadline_s())

    def _next_to_issue(self) -> int | None:
        """Returned tickets first: else a lost collector's ticket would be overtaken for ever."""
        if self.returned:
            return min(self.returned)
        if self.limits.max_tickets is None or self.next_ordinal < self.limits.max_tickets:
            return self.next_ordinal
        return None

    def _before(self, ordinal: int) -> int:
        """Uses that count against the room of `ordinal`: those owed by live tickets of lower ordinal. Returned ones do
        not count, else a lost collector's ticket blocks its own re-issue."""
        return sum(t.left for n, t in self.live.items() if n < ordinal)

    def _granted(self, member: MemberState) -> list[Ticket]:
        """The reply to the member's current request, as far as it still owns the tickets."""
        return [self._ticket(self.all[n]) for n, attempt in member.reply if self._owns(member, n, attempt)]

    def _owns(self, member: MemberState, ordinal: int, attempt: int) -> bool:
        ticket = self.all.get(ordinal)
        return ticket is not None and ordinal in member.owned and ticket.attempt == attempt

    def _ticket(self, ticket: TicketState) -> Ticket:
        return Ticket(ticket.ordinal, ticket.attempt, ticket.issued_for, ticket.times["issued"])

    def _grant(self, *, newest_only: bool = False) -> None:
        """Re-test the waiting collectors in order. A dead or lagging one consumes nothing and keeps its place; one that
        serves V and gets nothing ends the round, since nobody has more room. `newest_only`: see `commit`."""
        if self.phase != "running" or isinstance(self._admit(Weights(self.lineage, self.version)), str):
            return  # who serves the newest has the most room: if that is none, nobody has any
        for incarnation in list(self.waiters):
            member = self.members[incarnation]
            if not self._alive(member):
                continue
            if newest_only and (member.serving is None or member.serving.version < self.version):
                continue
            granted: list[tuple[int, int]] = []
            while len(granted) < member.want and not isinstance(ticket := self._issue(member), str):
                granted.append((ticket.ordinal, ticket.attempt))
            if granted:
                member.reply = tuple(granted)
                del self.waiters[incarnation]
                self.wakes.add(f"tickets:{incarnation}")
            elif member.serving is not None and member.serving.version >= self.version:
                return

    def _issue(self, member: MemberState) -> TicketState | str:
        """A ticket, or the guard that refuses it."""
        grant = self._admit(member.serving)
        if isinstance(grant, str):
            return grant
        if not self._make_space(self.limits.group_bytes):
            return "bytes"
        ordinal, uses = grant
        assert member.serving is not None
        ticket = self.all.get(ordinal)
        if ticket is None:
            ticket = self.all[ordinal] = TicketState(ordinal, State.RETURNED)
            self.next_ordinal += 1
        self.returned.discard(ordinal)
        ticket.state, ticket.owner, ticket.owner_name = State.ISSUED, member.member.incarnation, member.member.name
        ticket.issued_for, ticket.began, ticket.times = member.serving, self.now, {"issued": self.clock}
        ticket.progress, ticket.progress_at = 0, self.now
        ticket.header, ticket.reason, ticket.left, ticket.uses = None, "", uses, []
        self.reserved += self.limits.group_bytes
        self.live[ordinal] = ticket
        self._owe(self._owed(ticket), 1)
        member.owned.add(ordinal)
        return ticket

    def _admit(self, serving: Weights | None) -> tuple[int, int] | str:
        """The ordinal that a collector serving these weights would get now and the uses it would owe, or the guard that
        refuses it. Contract, 2."""
        limits = self.limits
        if serving is None or not self.tree.is_ancestor(serving, self.lineage):
            return "no_weights"
        if self._settles(serving):
            return "settling"
        if (ordinal := self._next_to_issue()) is None:
            return "no_rows"
        steps_left = limits.max_steps - self.version
        uses = min(limits.max_uses, 1 + limits.max_age - (self.version - serving.version), steps_left)
        if uses < 1:
            return "room"
        while not self._in_time(serving, uses):
            if uses == 1:
                return "due"
            uses -= 1
        space = room(
            max_age=limits.max_age,
            groups_per_step=limits.groups_per_step,
            version=self.version,
            serving=serving.version,
        )
        if self._before(ordinal) + uses > space:
            return "room"
        if sum(t.left for t in self.live.values()) + uses > steps_left * limits.groups_per_step:
            return "steps"
        if self.reserved + self.held_bytes + limits.group_bytes > limits.max_bytes:
            return "bytes"
        return ordinal, uses

    def _settles(self, serving: Weights) -> bool:
        """Just after a commit a collector that lags is about to serve the new version. A ticket issued before that is
        due one step earlier, which costs nothing under `wait`, and groups under the policies that give up."""
        limits = self.limits
        if limits.over_age == "wait" or limits.publish_every > 1 or serving.version >= self.version:
            return False
        return self.moved_at is not None and self.now - self.moved_at < SETTLE_S

    def _in_time(self, serving: Weights, uses: int) -> bool:
        """The due test with this ticket; only `wait` promises that nothing held expires."""
        if self.limits.over_age != "wait":
            return True
        return self._due_test(dict.fromkeys(self._promised(serving.version, uses), 1))

    def straggler_s(self) -> float:
        """After so many seconds an issued ticket is stale, `straggler`: 10 x the running median, at least a minute."""
        if not self.group_times:
            return self.limits.no_progress_s
        return min(max(STRAGGLER_FLOOR_S, STRAGGLER_FACTOR * median(self.group_times)), self.limits.no_progress_s)

    def _expire(self) -> None:
        """What time alone decides: lost collectors, tickets without progress, stragglers."""
        if self.phase != "running":
            return
        gone = [m for m in self.members.values() if not self._alive(m)]
        for member in sorted(gone, key=lambda m: (m.beat_at, m.member.incarnation)):
            self._forget(member, "member_lost", lost=True)
        changed = bool(gone)
        for ticket in [t for _, t in sorted(self.live.items()) if t.state is State.ISSUED]:
            if self.now - ticket.began > self.straggler_s():
                self._end(ticket, State.STALE, "straggler")
            elif self.now - ticket.progress_at > self.limits.ticket_progress_s:
                self._take_back(ticket, "no_progress", lost=True)
            else:
                continue
            changed = True
        if changed:
            self._grant()

    def _next_deadline_s(self) -> float:
        """Seconds until time alone may change something; an act moves `now` by CLOCK_STEP_S at most, so no wait for a
        deadline is longer."""
        moments = [m.beat_at + self.limits.member_timeout_s for m in self.members.values()]
        for ticket in self.live.values():
            if ticket.state is State.ISSUED:
                moments.append(ticket.progress_at + self.limits.ticket_progress_s)
                moments.append(ticket.began + self.straggler_s())
        return min(CLOCK_STEP_S, max(0.0, min(moments, default=self.now + CLOCK_STEP_S) - self.now))

    def beat(
        self,
        member: Member,
        serving: Weights | None,
        checksum: str,
        progress: Mapping[tuple[int, int], int],
        info: Mapping[str, Any],
    ) -> tuple[tuple[int, int], ...]:
        """Returns the (ordinal, attempt) that the member no longer owns."""
        state = self._member(member)
        state.beat_at = self.now  # before anything expires: it is here
        self._expire()
        if serving is not None and not self.tree.is_ancestor(serving, self.lineage):
            serving = None
        state.serving, state.checksum, state.info = serving, checksum, dict(info)
        revoked = []
        for (ordinal, attempt), count in progress.items():
            if not self._owns(state, ordinal, attempt):
                revoked.append((ordinal, attempt))
                continue
            ticket = self.all[ordinal]
            if count > ticket.progress:
                ticket.progress, ticket.progress_at = count, self.now
        self._grant()
        return tuple(sorted(revoked))

    def refusals(self) -> dict[str, tuple[str, float]]:
        """Incarnation of each collector that waits for tickets -> the guard that refuses it now, and since when it
        waits (stamp). For `status`."""
        found = {}
        for incarnation in self.waiters:
            refused = self._admit(self.members[incarnation].serving)
            found[incarnation] = (refused if isinstance(refused, str) else "turn", self.members[incarnation].asked)
        return found
