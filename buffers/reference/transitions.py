"""Moves between ticket states. Each keeps four sums true: counts per state, dues, bytes, ownership."""

from __future__ import annotations

from asyncrl.buffers.base import FORFEITED, State
from asyncrl.buffers.reference.common import REQUEUES, ROOT, Common, TicketState, Work
from asyncrl.staleness import Candidate, Weights, due, in_window, uses_kept


class Transitions(Common):
    """What happens to one ticket."""

    def _leave_live(self, ticket: TicketState) -> None:
        """Undo what issued, held or leased had taken: room, dues, bytes, ownership."""
        if ticket.ordinal not in self.live:
            return
        self._owe(self._owed(ticket), -1)
        if ticket.state is State.ISSUED:
            self.reserved -= self.limits.group_bytes
            if owner := self.members.get(ticket.owner):
                owner.owned.discard(ticket.ordinal)
        else:
            self.held_bytes -= ticket.size
        del self.live[ticket.ordinal]

    def _take_back(self, ticket: TicketState, why: str, *, lost: bool, work: Work | None = None) -> None:
        """Issued or held -> returned, or failed as `poison` after it lost too many collectors."""
        if lost:
            ticket.losses += 1
            if ticket.losses >= self.limits.max_losses:
                self._end(ticket, State.FAILED, "poison", work)
                return
        self._return(ticket, why, work)

    def _return(self, ticket: TicketState, why: str, work: Work | None = None) -> None:
        """Back to be issued again, as the next attempt."""
        self._lose(ticket, f"{State.RETURNED}/{why}", work)
        self.returns[why] = self.returns.get(why, 0) + 1
        self._tell_owner(ticket)
        self._leave_live(ticket)
        self.payload.pop(ticket.ordinal, None)
        ticket.state, ticket.attempt, ticket.owner, ticket.owner_name = State.RETURNED, ticket.attempt + 1, "", ""
        ticket.header, ticket.ended_at, ticket.reason, ticket.size = None, None, "", 0
        ticket.left, ticket.uses, ticket.times = 0, [], {}
        self.returned.add(ticket.ordinal)
        self._wake_learner()

    def _end(self, ticket: TicketState, state: State, reason: str, work: Work | None = None) -> None:
        """To a terminal state other than trained."""
        key = f"{state}/{reason}"
        self._lose(ticket, key, work)
        self.reasons[key] = self.reasons.get(key, 0) + 1
        self._tell_owner(ticket)
        self._leave_live(ticket)
        self.returned.discard(ticket.ordinal)
        self.payload.pop(ticket.ordinal, None)
        ticket.state, ticket.reason, ticket.ended_at = state, reason, Weights(self.lineage, self.version)
        ticket.size, ticket.left, ticket.times["ended"] = 0, 0, self.clock
        self._wake_learner()

    def _tell_owner(self, ticket: TicketState) -> None:
        """Work in progress is not wanted any more. Who hands it back itself knows."""
        itself = ticket.last == (ticket.owner, ticket.attempt)
        if ticket.state is State.ISSUED and ticket.owner in self.members and not itself:
            self.wakes.add(f"nudge:{ticket.owner}")

    def _lose(self, ticket: TicketState, key: str, work: Work | None) -> None:
        """Account for work that is thrown away: as the caller knows it; else the held group's own; else the progress
        last reported, a lower bound."""
        if work is None and ticket.header is not None:
            work = Work.of(ticket.header)
        elif work is None:
            sampled = ticket.progress if ticket.state is State.ISSUED else 0
            work = Work(sampled, 0.0, None, sampled / self.limits.group_size)
        self.lost_tokens[key] = self.lost_tokens.get(key, 0) + work.tokens
        self.lost_seconds[key] = self.lost_seconds.get(key, 0.0) + work.seconds
        self._remember(key, work.reward, work.length)

    def _remember(self, key: str, reward: float | None, length: float) -> None:
        if reward is not None:
            total, n = self.rewards.get(key, (0.0, 0))
            self.rewards[key] = (total + reward, n + 1)
        if length > 0:
            total, n = self.lengths.get(key, (0.0, 0))
            self.lengths[key] = (total + length, n + 1)

    def _over_age(self, ticket: TicketState, work: Work | None = None) -> None:
        """A ticket that no step may train any more: what of it was trained stays trained, the rest is the policy's."""
        if ticket.uses:
            self._forfeit(ticket, "over_age")
            self._train(ticket)
        elif self.limits.over_age == "requeue" and ticket.requeues < REQUEUES:
            ticket.requeues += 1
            self._return(ticket, "over_age", work)
        else:
            self._end(ticket, State.STALE, "over_age", work)

    def _expire_window(self) -> None:
        """After V moved: what has left the window, and uses that no longer fit before its end or the run's. Under
        `mask` work in progress still gets newer tokens, and under `wait` nothing leaves the window that was never
        trained."""
        for ticket in [t for _, t in sorted(self.live.items())]:
            edge, policy = self.edge(ticket), self.limits.over_age
            growing = ticket.state is State.ISSUED and policy == "mask"
            fit = min(due(edge, self.limits.max_age), self.limits.max_steps - 1) - self.version + 1
            if ticket.left > fit > 0:
                self._forfeit(ticket, "no_step_left", keep=fit)
            inside = in_window(edge, version=self.version, max_age=self.limits.max_age)
            if not inside and (policy != "wait" or ticket.uses) and not growing:
                self._over_age(ticket)
        self._trim_uses()

    def _trim_uses(self) -> None:
        """Where each batch has a share of fresh groups, a step trains B - F others at most. Uses that find no step in
        their window, or before the end of the run, are given up, the youngest groups' first; all of them once no fresh
        group can come. So those that were trained never hold room that fresh groups need."""
        limits = self.limits
        if not limits.fresh_per_step:
            return
        used = [t for _, t in sorted(self.live.items()) if t.uses]
        can_come = len(used) < len(self.live) or self._more_to_come()
        kept = uses_kept(
            [self._candidate(t) for t in used],
            version=self.version,
            max_age=limits.max_age,
            again_per_step=limits.groups_per_step - limits.fresh_per_step if can_come else 0,
            last_step=limits.max_steps - 1,
        )
        for ticket in used:
            keep = kept[ticket.ordinal]
            if keep < ticket.left:
                self._forfeit(ticket, "min_fresh", keep=keep)
                if not keep:
                    self._train(ticket)

    def _candidate(self, ticket: TicketState) -> Candidate:
        """What the choice of a batch sees of a live ticket."""
        held = ticket.state is State.HELD
        return Candidate(ticket.ordinal, held=held, lo=self.edge(ticket), uses=ticket.left, used=bool(ticket.uses))

    def _forfeit(self, ticket: TicketState, why: str, *, keep: int = 0) -> None:
        """Give up uses that a live ticket still owes, all but the last `keep`."""
        key = f"{FORFEITED}{why}"
        self.reasons[key] = self.reasons.get(key, 0) + ticket.left - keep
        self._owe(self._owed(ticket), -1)
        ticket.left = keep
        self._owe(self._owed(ticket), 1)

    def _train(self, ticket: TicketState, *, skipped: bool = False) -> None:
        """Terminal: its last use is over. The payload stays if a rewind could use it again: that needs tokens of
        weights that the last checkpoint contains, everything else has tokens of weights that would be dead."""
        use = ticket.last_use
        assert use is not None
        header = ticket.header
        self._leave_live(ticket)
        ticket.state, ticket.reason, ticket.left = State.TRAINED, "skipped" if skipped else "trained", 0
        ticket.ended_at, ticket.times["ended"] = Weights(use.lineage, use.version), self.clock
        key = f"{State.TRAINED}/{ticket.reason}"
        self.reasons[key] = self.reasons.get(key, 0) + 1
        if header is not None:
            self._remember(key, header.reward, header.length)
        can_return = header is not None and self.checkpoint is not None and header.newest <= self.checkpoint
        if can_return and ticket.ordinal in self.payload:
            self.kept[ticket.ordinal] = ticket
            self.kept_bytes += ticket.size
        else:
            self.payload.pop(ticket.ordinal, None)
            ticket.size = 0

    def _make_space(self, need: int) -> bool:
        """Payloads kept only for a rewind are given up first, oldest step first: they must never starve tickets."""
        for ordinal in sorted(self.kept, key=lambda n: ((self.kept[n].last_use or ROOT).version, n)):
            if self.reserved + self.held_bytes + self.kept_bytes + need <= self.limits.max_bytes:
                return True
            self._drop_kept(ordinal)
        return self.reserved + self.held_bytes + self.kept_bytes + need <= self.limits.max_bytes

    def _drop_kept(self, ordinal: int) -> None:
        ticket = self.kept.pop(ordinal)
        self.kept_bytes -= ticket.size
        ticket.size = 0
        self.payload.pop(ordinal, None)
