"""The learner's side: which held tickets a step trains, and the one act that marks them trained. Contract, 4 and 5."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.buffers.base import BufferError, Commit, Lease, State
from asyncrl.buffers.reference.common import QUARANTINE, LeaseState, TicketState, Wait
from asyncrl.buffers.reference.put import Puts
from asyncrl.staleness import Choice, Weights, choose_batch


class Leases(Puts):
    """Lease, release, commit, checkpointed."""

    def lease(self, lineage: int, step: int) -> Lease | Wait:
        self._check_lineage(lineage)
        if self.leased is not None and self.leased.step == step:
            return self._lease(self.leased)
        if step != self.version:
            raise BufferError(f"step {step} cannot be leased: the next step starts from version {self.version}")
        self._expire()
        if self.version >= self.limits.max_steps:
            return Lease(lineage, step, 0, (), ())
        choice = self._choose()
        if not choice.batch and choice.waiting_for == () and not self._more_to_come():
            self._trim_uses()
            return Lease(lineage, step, 0, (), ())
        if not choice.batch:
            self.learner_waits = self.clock if self.learner_waits is None else self.learner_waits
            self.waiting = Wait(choice.waiting_for, self._next_deadline_s())
            return self.waiting
        self.learner_waits, self.waiting = None, None
        for ordinal in choice.batch:
            ticket = self.live[ordinal]
            self._owe(self._owed(ticket)[:1], -1)
            ticket.state, ticket.times["leased"] = State.LEASED, self.clock
        self.leased = LeaseState(lineage, step, self.next_lease_attempt, choice.batch)
        self._grant()
        return self._lease(self.leased)

    def _choose(self) -> Choice:
        grant = self._admit(Weights(self.lineage, self.version)) if self.returned else ""
        return choose_batch(
            [self._candidate(t) for _, t in sorted(self.live.items())],
            version=self.version,
            max_age=self.limits.max_age,
            groups_per_step=self.limits.groups_per_step,
            lookahead=self.limits.lookahead,
            guard_dues=self.limits.over_age == "wait",
            more_to_come=self._more_to_come(),
            fresh_per_step=self.limits.fresh_per_step,
            returned=None if isinstance(grant, str) else grant[0],
        )

    def _lease(self, lease: LeaseState) -> Lease:
        headers = tuple(h for n in lease.ordinals if (h := self.all[n].header) is not None)
        uses = tuple(len(self.all[n].uses) for n in lease.ordinals)
        return Lease(lease.lineage, lease.step, lease.attempt, lease.ordinals, headers, uses)

    def release(self, lineage: int, step: int) -> bool:
        self._check_lineage(lineage)
        if self.leased is None or self.leased.step != step:
            return False
        self._give_back(self.leased)
        return True

    def _give_back(self, lease: LeaseState) -> None:
        self.next_lease_attempt = lease.attempt + 1
        for ordinal in lease.ordinals:
            ticket = self.all[ordinal]
            ticket.state = State.HELD
            self._owe(self._owed(ticket)[:1], 1)
        self.leased = None

    def quarantine(self, lineage: int, step: int, ordinals: Sequence[int], reason: str) -> None:
        """Set damaged payloads of the leased batch aside, return their tickets, give the rest of the lease back."""
        self._check_lineage(lineage)
        if self.leased is None or self.leased.step != step:
            return  # done already: the reply was lost
        bad = [n for n in self.leased.ordinals if n in set(ordinals)]
        self._give_back(self.leased)
        for ordinal in bad:
            ticket = self.all[ordinal]
            if (payload := self.payload.pop(ordinal, None)) is not None:
                self.aside[f"{ordinal}:{ticket.attempt}"] = payload
            while len(self.aside) > QUARANTINE:
                del self.aside[next(iter(self.aside))]
            self.quarantined += 1
            if ticket.uses:  # it was sound before: that use is all it gets
                self._forfeit(ticket, reason)
                self._train(ticket)
            else:
                self._take_back(ticket, reason, lost=True)
        self._grant()

    def commit(self, lineage: int, step: int, skipped: bool) -> Commit:
        self._check_lineage(lineage)
        if self.commits.get(step) == lineage and step < self.version:
            return self._committed(repeated=True)
        if self.leased is None or self.leased.step != step:
            raise BufferError(f"step {step} has no lease to commit; V is {self.version}")
        lease, self.leased = self.leased, None
        for ordinal in lease.ordinals:
            self._use(self.all[ordinal], Weights(lineage, step), skipped=skipped)
        self._move_to(step + 1, lineage)
        return self._committed(repeated=False)

    def _use(self, ticket: TicketState, use: Weights, *, skipped: bool) -> None:
        """Record a use of a leased ticket: it is held again while it owes another, else trained."""
        ticket.uses.append(use)
        if ticket.left > 1:
            ticket.left -= 1
            ticket.state = State.HELD
        else:
            self._train(ticket, skipped=skipped)

    def _committed(self, *, repeated: bool) -> Commit:
        return Commit(self.version, repeated=repeated, ended=self.version >= self.limits.max_steps)

    def _move_to(self, version: int, lineage: int) -> None:
        """V moves: the one place where room is freed, by the version and not by an acknowledgement."""
        self.next_lease_attempt = 0
        self.commits[version - 1] = lineage
        self.version, self.moved_at = version, self.now
        if self.version >= self.limits.max_steps:
            self._end_run()
        else:
            self._expire_window()
        # Who waits still serves V - 1, and gets V in a moment where every version is published: a ticket issued before
        # that would be due one step earlier. Its next beat, after the activation or in two seconds, asks again.
        self._grant(newest_only=self.limits.publish_every == 1)

    def _end_run(self) -> None:
        """The last commit: what is live now will never be trained, and says so."""
        for ticket in [self.all[n] for n in sorted({*self.live, *self.returned})]:
            if ticket.uses:
                self._forfeit(ticket, "run_end")
                self._train(ticket)
            else:
                self._end(ticket, State.STALE, "run_end")

    def checkpointed(self, lineage: int, version: int, oldest: int | None = None) -> None:
        self._check_lineage(lineage)
        if version > self.version:
            raise BufferError(f"a checkpoint of version {version} cannot exist: V is {self.version}")
        self.checkpoint = version
        self.covered = version if oldest is None else min(oldest, version)
        # No rewind goes behind the oldest checkpoint on this branch: what earlier steps trained need not be kept.
        for ordinal in [n for n, t in sorted(self.kept.items()) if t.last_use and t.last_use.version < self.covered]:
            self._drop_kept(ordinal)
        for step in [step for step in self.commits if step < self.covered]:
            del self.commits[step]
