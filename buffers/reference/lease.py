"""The learner's side: which held tickets a step trains, and the one act that marks them trained. Contract, 4 and 5."""

from __future__ import annotations

from asyncrl.buffers.base import BufferError, Commit, Lease, State
from asyncrl.buffers.reference.common import LeaseState, Wait
from asyncrl.buffers.reference.put import Puts
from asyncrl.staleness import Candidate, Choice, Weights, choose_batch, due, in_window


class Leases(Puts):
    """Lease, release, commit, checkpointed."""

    def lease(self, lineage: int, step: int, now: float) -> Lease | Wait:
        self._check_lineage(lineage)
        if self.leased is not None and self.leased.step == step:
            return self._lease(self.leased)
        if step != self.version:
            raise BufferError(f"step {step} cannot be leased: the next step starts from version {self.version}")
        self._expire(now)
        if self.version >= self.limits.max_steps:
            return Lease(lineage, step, 0, (), ())
        choice = self._choose()
        if not choice.batch and choice.waiting_for == () and not self._more_to_come():
            return Lease(lineage, step, 0, (), ())
        if not choice.batch:
            self.learner_waits = True
            self.waiting = Wait(choice.waiting_for, self._next_deadline(now))
            return self.waiting
        self.learner_waits, self.waiting = False, None
        for ordinal in choice.batch:
            ticket = self.live[ordinal]
            self._owe(due(ticket.lo, self.limits.max_age), -1)
            ticket.state = State.LEASED
        self.leased = LeaseState(lineage, step, self.next_lease_attempt, choice.batch)
        self._grant(now)
        return self._lease(self.leased)

    def _choose(self) -> Choice:
        live = [Candidate(n, held=t.state is State.HELD, lo=t.lo) for n, t in sorted(self.live.items())]
        return choose_batch(
            live,
            version=self.version,
            max_age=self.limits.max_age,
            groups_per_step=self.limits.groups_per_step,
            lookahead=self.limits.lookahead,
            guard_dues=self.limits.over_age == "wait",
            more_to_come=self._more_to_come(),
        )

    def _more_to_come(self) -> bool:
        if self.returned or any(t.state is State.ISSUED for t in self.live.values()):
            return True
        return self.limits.max_tickets is None or self.next_ordinal < self.limits.max_tickets

    def _lease(self, lease: LeaseState) -> Lease:
        headers = tuple(h for n in lease.ordinals if (h := self.all[n].header) is not None)
        return Lease(lease.lineage, lease.step, lease.attempt, lease.ordinals, headers)

    def release(self, lineage: int, step: int, now: float) -> bool:
        self._check_lineage(lineage)
        if self.leased is None or self.leased.step != step:
            return False
        self.next_lease_attempt = self.leased.attempt + 1
        for ordinal in self.leased.ordinals:
            ticket = self.all[ordinal]
            ticket.state = State.HELD
            self._owe(due(ticket.lo, self.limits.max_age), 1)
        self.leased = None
        return True

    def commit(self, lineage: int, step: int, skipped: bool, now: float) -> Commit:
        self._check_lineage(lineage)
        if self.commits.get(step) == lineage and step < self.version:
            return Commit(self.version, repeated=True, ended=self.version >= self.limits.max_steps)
        if self.leased is None or self.leased.step != step:
            raise BufferError(f"step {step} has no lease to commit; V is {self.version}")
        for ordinal in self.leased.ordinals:
            ticket = self.live.pop(ordinal)
            self.held_bytes -= ticket.size
            ticket.state, ticket.reason = State.TRAINED, "skipped" if skipped else "trained"
            ticket.trained = ticket.ended_at = Weights(lineage, step)
            key = f"{State.TRAINED}/{ticket.reason}"
            self.reasons[key] = self.reasons.get(key, 0) + 1
            header = ticket.header
            assert header is not None
            if self.checkpoint is not None and header.newest <= self.checkpoint:
                # Only these can be used again after a rewind: everything else contains tokens of dead weights.
                self.kept[ordinal] = ticket
                self.kept_bytes += ticket.size
            else:
                self.payload.pop(ordinal, None)
                ticket.size = 0
        self.leased, self.next_lease_attempt = None, 0
        self.commits[step] = lineage
        self.version = step + 1
        if self.version >= self.limits.max_steps:
            self._end_run()
        elif self.limits.over_age == "drop":
            for ticket in [t for _, t in sorted(self.live.items())]:
                if not in_window(ticket.lo, version=self.version, max_age=self.limits.max_age):
                    self._end(ticket, State.STALE, "over_age")
        # Who waits still serves V - 1, and gets V in a moment where every version is published: a ticket issued before
        # that would be due one step earlier. Its next beat, after the activation or in two seconds, asks again.
        self._grant(now, newest_only=self.limits.publish_every == 1)
        return Commit(self.version, repeated=False, ended=self.version >= self.limits.max_steps)

    def _end_run(self) -> None:
        """The last commit: what is live now will never be trained, and says so."""
        for ticket in [self.all[n] for n in sorted({*self.live, *self.returned})]:
            self._end(ticket, State.STALE, "run_end")

    def checkpointed(self, lineage: int, version: int) -> None:
        self._check_lineage(lineage)
        if version > self.version:
            raise BufferError(f"a checkpoint of version {version} cannot exist: V is {self.version}")
        self.checkpoint = version
        for ordinal in [n for n, t in sorted(self.kept.items()) if t.trained and t.trained.version < version]:
            self._drop_kept(ordinal)
