"""The reference model of one run's buffer: plain Python, one lock's worth of state, time passed in. What the contract
says, in the contract's order; `scripts/` states the same rules on the server, and a stateful test drives both.

    live:  returned -> issued -> held -> leased          terminal: trained, stale, filtered, failed
              ^----------+--------+-------+  (collector lost, rewind, release)

Every public method is one atomic act at time `now` (unix seconds). Nothing fires by itself: methods that a client may
have to repeat return the next deadline at which repeating could help.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from asyncrl.buffers.base import (
    BufferError,
    Commit,
    FailKind,
    Fenced,
    GroupHeader,
    Lease,
    Limits,
    Member,
    PutResult,
    State,
    Ticket,
    UnknownMember,
)
from asyncrl.staleness import (
    Candidate,
    Choice,
    Lineages,
    Weights,
    choose_batch,
    due,
    due_test,
    in_window,
    room,
)

GROUP_TIMES = 64  # recent groups whose median sets the straggler deadline: enough to be steady, few enough to sort
STRAGGLER_FACTOR = 10.0  # x the median: beyond it a group is broken rather than long
STRAGGLER_FLOOR_S = 60.0  # short groups have noisy medians; nobody minds waiting a minute once
SWEEP_CHUNK = 500  # tickets a rewind looks at in one atomic act, so that the server is never blocked for long


@dataclass(slots=True)
class TicketState:
    ordinal: int
    state: State
    attempt: int = 0
    reason: str = ""
    owner: str = ""  # incarnation
    owner_name: str = ""
    issued_for: Weights = Weights(0, 0)
    issued: float = 0.0
    progress: int = 0
    progress_at: float = 0.0
    losses: int = 0
    header: GroupHeader | None = None
    answer: PutResult | None = None  # what the put or fail of this attempt was answered, for a repeat
    size: int = 0
    trained: Weights | None = None
    ended_at: Weights | None = None  # (lineage, V) when it became terminal
    last: tuple[str, int] = ("", -1)  # owner and attempt of the last put or fail, to answer a repeat

    @property
    def lo(self) -> int:
        return self.header.oldest if self.header is not None else self.issued_for.version


@dataclass(slots=True)
class MemberState:
    member: Member
    serving: Weights | None = None
    checksum: str = ""
    beat_at: float = 0.0
    seq: int = -1
    want: int = 0
    reply: tuple[tuple[int, int], ...] = ()
    owned: set[int] = field(default_factory=set)
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class LeaseState:
    lineage: int
    step: int
    attempt: int
    ordinals: tuple[int, ...]


@dataclass(slots=True)
class Wait:
    """No answer yet: which tickets are waited for, and when asking again could help without being woken."""

    for_ordinals: tuple[int, ...]
    deadline: float


class Model:
    """See the module. Wakes are collected in `wakes` ("learner", or an incarnation with a reason) for the async face."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.version = 0
        self.lineage = 0
        self.tree = Lineages({})
        self.phase = "running"
        self.sweep: int | None = None  # next ordinal a rewind looks at
        self.sweep_dues: dict[int, int] = {}
        self.next_ordinal = 0
        self.all: dict[int, TicketState] = {}
        self.live: dict[int, TicketState] = {}  # issued, held, leased
        self.returned: set[int] = set()
        self.dues: dict[int, int] = {}  # due step -> issued and held tickets
        self.members: dict[str, MemberState] = {}
        self.waiters: dict[str, None] = {}  # incarnations in order of asking
        self.leased: LeaseState | None = None
        self.next_lease_attempt = 0
        self.commits: dict[int, int] = {}  # step -> lineage that committed it
        self.checkpoint: int | None = None
        self.payload: dict[int, bytes] = {}
        self.kept: dict[int, TicketState] = {}  # trained, payload kept for a rewind
        self.reserved = self.held_bytes = self.kept_bytes = 0
        self.group_times: deque[float] = deque(maxlen=GROUP_TIMES)
        self.learner_waits = False
        self.waiting: Wait | None = None
        self.reasons: dict[str, int] = {}
        self.lost_tokens: dict[str, int] = {}
        self.lost_seconds: dict[str, float] = {}
        self.refused_puts = 0
        self.announced: tuple[Weights, dict[str, Any]] | None = None
        self.evaluation: dict[str, Any] | None = None
        self.evaluation_claim = ""
        self.results: dict[str, dict[str, Any]] = {}
        self.error: str | None = None
        self.wakes: set[str] = set()

    # --- members ----------------------------------------------------------------------------------------------------

    def join(self, member: Member, info: Mapping[str, Any], now: float) -> None:
        for other in [m for m in self.members.values() if m.member.name == member.name]:
            if other.member.incarnation != member.incarnation:
                self._forget(other, lost=True, now=now)
        if member.incarnation not in self.members:
            self.members[member.incarnation] = MemberState(member, beat_at=now, info=dict(info))
        self._grant(now)

    def leave(self, member: Member, now: float) -> None:
        if state := self.members.get(member.incarnation):
            self._forget(state, lost=False, now=now)
            self._grant(now)

    def _member(self, member: Member) -> MemberState:
        try:
            return self.members[member.incarnation]
        except KeyError:
            raise UnknownMember(f"collector {member.name!r} ({member.incarnation}) is not known to the run") from None

    def _forget(self, member: MemberState, *, lost: bool, now: float) -> None:
        del self.members[member.member.incarnation]
        self.waiters.pop(member.member.incarnation, None)
        if self.evaluation_claim == member.member.incarnation:
            self.evaluation_claim = ""
            self._wake_members()
        for ordinal in sorted(member.owned):
            self._take_back(self.all[ordinal], lost=lost)

    def _alive(self, member: MemberState, now: float) -> bool:
        return now - member.beat_at <= self.limits.member_timeout_s

    # --- tickets ----------------------------------------------------------------------------------------------------

    def tickets(self, member: Member, seq: int, want: int, now: float) -> list[Ticket] | Wait:
        state = self._member(member)
        self._expire(now)
        state = self._member(member)  # it may itself have been expired
        state.beat_at = now
        if seq < state.seq:
            raise BufferError(f"request {seq} of {member.name!r} comes after {state.seq}; numbers must grow")
        if seq > state.seq:
            state.seq, state.want, state.reply = seq, want, ()
            self.waiters.pop(member.incarnation, None)
        if not state.reply and state.want > 0:
            # Behind those who waited before: one path for old and new requests keeps the order fair.
            self.waiters.setdefault(member.incarnation)
            self._grant(now)
        granted = [self._ticket(self.all[n]) for n, attempt in state.reply if self._owns(state, n, attempt)]
        return granted or Wait((), self._next_deadline(now))

    def _owns(self, member: MemberState, ordinal: int, attempt: int) -> bool:
        ticket = self.all.get(ordinal)
        return ticket is not None and ordinal in member.owned and ticket.attempt == attempt

    def _ticket(self, ticket: TicketState) -> Ticket:
        return Ticket(ticket.ordinal, ticket.attempt, ticket.issued_for, ticket.issued)

    def _grant(self, now: float) -> None:
        """Re-test the waiting collectors in order. A dead or lagging one consumes nothing and keeps its place; one that
        serves V and gets nothing ends the round, since nobody has more room."""
        if self.phase != "running":
            return
        for incarnation in list(self.waiters):
            member = self.members[incarnation]
            if not self._alive(member, now):
                continue
            granted = []
            while len(granted) < member.want and (ticket := self._issue(member, now)) is not None:
                granted.append((ticket.ordinal, ticket.attempt))
            if granted:
                member.reply = tuple(granted)
                del self.waiters[incarnation]
                self.wakes.add(f"tickets:{incarnation}")
            elif member.serving is not None and member.serving.version >= self.version:
                return

    def _issue(self, member: MemberState, now: float) -> TicketState | None:
        limits, serving = self.limits, member.serving
        if serving is None or not self.tree.is_ancestor(serving, self.lineage):
            return None
        if self.returned:
            ordinal = min(self.returned)
        elif limits.max_tickets is None or self.next_ordinal < limits.max_tickets:
            ordinal = self.next_ordinal
        else:
            return None
        lower = sum(1 for n in self.live if n < ordinal)
        space = room(
            max_age=limits.max_age,
            groups_per_step=limits.groups_per_step,
            version=self.version,
            serving=serving.version,
        )
        if lower + 1 > space:
            return None
        if len(self.live) + 1 > (limits.max_steps - self.version) * limits.groups_per_step:
            return None
        step = due(serving.version, limits.max_age)
        if limits.over_age == "wait" and not self._due_test({step: 1}):
            return None
        if not self._make_space(limits.group_bytes):
            return None
        ticket = self.all.get(ordinal)
        if ticket is None:
            ticket = self.all[ordinal] = TicketState(ordinal, State.RETURNED)
            self.next_ordinal += 1
        self.returned.discard(ordinal)
        ticket.state, ticket.owner, ticket.owner_name = State.ISSUED, member.member.incarnation, member.member.name
        ticket.issued_for, ticket.issued = serving, now
        ticket.progress, ticket.progress_at = 0, now
        ticket.header, ticket.answer, ticket.reason = None, None, ""
        self.reserved += limits.group_bytes
        self.live[ordinal] = ticket
        self._owe(step, 1)
        member.owned.add(ordinal)
        return ticket

    def _due_test(self, extra: Mapping[int, int]) -> bool:
        """Contract 1: with step V's batch leased, count from V + 1; `dues` leaves leased tickets out already."""
        owed = dict(self.dues)
        for step, uses in extra.items():
            owed[step] = owed.get(step, 0) + uses
        first = self.version + (1 if self.leased is not None else 0)
        return due_test(owed, first_step=first, groups_per_step=self.limits.groups_per_step)

    def _owe(self, step: int, uses: int) -> None:
        self.dues[step] = self.dues.get(step, 0) + uses
        if self.dues[step] == 0:
            del self.dues[step]

    def _make_space(self, need: int) -> bool:
        """Payloads kept only for a rewind are given up first, oldest step first: they must never starve tickets."""
        for ordinal in sorted(self.kept, key=lambda n: (self.kept[n].trained or Weights(0, 0), n)):
            if self.reserved + self.held_bytes + self.kept_bytes + need <= self.limits.max_bytes:
                return True
            self._drop_kept(ordinal)
        return self.reserved + self.held_bytes + self.kept_bytes + need <= self.limits.max_bytes

    def _drop_kept(self, ordinal: int) -> None:
        ticket = self.kept.pop(ordinal)
        self.kept_bytes -= ticket.size
        self.payload.pop(ordinal, None)

    # --- transitions ------------------------------------------------------------------------------------------------

    def _leave_live(self, ticket: TicketState) -> None:
        """Undo what issued, held or leased had taken: room, dues, bytes, ownership."""
        if ticket.state in (State.ISSUED, State.HELD):
            self._owe(due(ticket.lo, self.limits.max_age), -1)
        if ticket.state is State.ISSUED:
            self.reserved -= self.limits.group_bytes
            if owner := self.members.get(ticket.owner):
                owner.owned.discard(ticket.ordinal)
        elif ticket.state in (State.HELD, State.LEASED):
            self.held_bytes -= ticket.size
        self.live.pop(ticket.ordinal, None)

    def _take_back(self, ticket: TicketState, *, lost: bool) -> None:
        """Issued -> returned, or failed as `poison` after it lost too many collectors."""
        if lost:
            ticket.losses += 1
            if ticket.losses >= self.limits.max_losses:
                self._end(ticket, State.FAILED, "poison")
                return
        self._return(ticket)

    def _return(self, ticket: TicketState) -> None:
        self._leave_live(ticket)
        self.payload.pop(ticket.ordinal, None)
        ticket.state, ticket.attempt, ticket.owner, ticket.owner_name = State.RETURNED, ticket.attempt + 1, "", ""
        ticket.header, ticket.trained, ticket.ended_at, ticket.reason, ticket.size = None, None, None, "", 0
        self.returned.add(ticket.ordinal)
        self._wake_learner()

    def _end(
        self, ticket: TicketState, state: State, reason: str, *, tokens: int | None = None, seconds: float = 0.0
    ) -> None:
        """To a terminal state other than trained. `tokens` and `seconds`: what was lost, where the caller knows it; else
        the held group's own, else the progress last reported (a lower bound)."""
        if tokens is None:
            tokens = ticket.header.tokens if ticket.header else ticket.progress
            seconds = ticket.header.seconds if ticket.header else 0.0
        self._leave_live(ticket)
        self.returned.discard(ticket.ordinal)
        self.payload.pop(ticket.ordinal, None)
        ticket.state, ticket.reason, ticket.ended_at = state, reason, Weights(self.lineage, self.version)
        ticket.size = 0
        key = f"{state}/{reason}"
        self.reasons[key] = self.reasons.get(key, 0) + 1
        self.lost_tokens[key] = self.lost_tokens.get(key, 0) + tokens
        self.lost_seconds[key] = self.lost_seconds.get(key, 0.0) + seconds
        if ticket.owner in self.members:
            self.wakes.add(f"nudge:{ticket.owner}")
        self._wake_learner()

    # --- time -------------------------------------------------------------------------------------------------------

    def straggler_s(self) -> float:
        """After so many seconds an issued ticket is stale, `straggler`: 10 x the running median, at least a minute."""
        if not self.group_times:
            return self.limits.no_progress_s
        return min(max(STRAGGLER_FLOOR_S, STRAGGLER_FACTOR * median(self.group_times)), self.limits.no_progress_s)

    def _expire(self, now: float) -> None:
        """What time alone decides: lost collectors, tickets without progress, stragglers."""
        if self.phase != "running":
            return
        gone = [m for m in self.members.values() if not self._alive(m, now)]
        for member in sorted(gone, key=lambda m: (m.beat_at, m.member.incarnation)):
            self._forget(member, lost=True, now=now)
        changed = bool(gone)
        for ticket in [t for _, t in sorted(self.live.items()) if t.state is State.ISSUED]:
            if now - ticket.issued > self.straggler_s():
                self._end(ticket, State.STALE, "straggler")
            elif now - ticket.progress_at > self.limits.ticket_progress_s:
                if ticket.owner in self.members:
                    self.wakes.add(f"nudge:{ticket.owner}")
                self._take_back(ticket, lost=True)
            else:
                continue
            changed = True
        if changed:
            self._grant(now)

    def _next_deadline(self, now: float) -> float:
        moments = [m.beat_at + self.limits.member_timeout_s for m in self.members.values()]
        for ticket in self.live.values():
            if ticket.state is State.ISSUED:
                moments.append(ticket.progress_at + self.limits.ticket_progress_s)
                moments.append(ticket.issued + self.straggler_s())
        return min(moments, default=now + self.limits.no_progress_s)

    # --- beat, put, fail --------------------------------------------------------------------------------------------

    def beat(
        self,
        member: Member,
        serving: Weights | None,
        checksum: str,
        progress: Mapping[tuple[int, int], int],
        info: Mapping[str, Any],
        now: float,
    ) -> tuple[tuple[int, int], ...]:
        """Returns the (ordinal, attempt) that the member no longer owns."""
        state = self._member(member)
        state.beat_at = now  # before anything expires: it is here
        self._expire(now)
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
                ticket.progress, ticket.progress_at = count, now
        self._grant(now)
        return tuple(sorted(revoked))

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
        if not usable or header.oldest < ticket.issued_for.version or header.newest > self.version:
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

    def _is_owner(self, ticket: TicketState, member: Member, attempt: int) -> bool:
        """The identity of a lease of work: right attempt, right incarnation, still issued. Without this guard a collector
        that was given up puts over its successor."""
        return ticket.state is State.ISSUED and ticket.attempt == attempt and ticket.owner == member.incarnation

    def _repeat(self, ticket: TicketState | None, member: Member, attempt: int) -> PutResult | None:
        """A put or fail whose reply was lost is answered as the first time, `held` as `duplicate`."""
        if ticket is None or ticket.last != (member.incarnation, attempt) or ticket.answer is None:
            return None
        return "duplicate" if ticket.answer == "held" else ticket.answer

    # --- lease, release, commit -------------------------------------------------------------------------------------

    def _check_lineage(self, lineage: int) -> None:
        if lineage != self.lineage:
            raise Fenced(f"learner of lineage {lineage} was replaced by lineage {self.lineage}; it must stop")

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
            for ticket in [self.all[n] for n in sorted({*self.live, *self.returned})]:
                self._end(ticket, State.STALE, "run_end")
        elif self.limits.over_age == "drop":
            for ticket in [t for _, t in sorted(self.live.items())]:
                if not in_window(ticket.lo, version=self.version, max_age=self.limits.max_age):
                    self._end(ticket, State.STALE, "over_age")
        self._grant(now)
        return Commit(self.version, repeated=False, ended=self.version >= self.limits.max_steps)

    def checkpointed(self, lineage: int, version: int) -> None:
        self._check_lineage(lineage)
        if version > self.version:
            raise BufferError(f"a checkpoint of version {version} cannot exist: V is {self.version}")
        self.checkpoint = version
        for ordinal in [n for n, t in sorted(self.kept.items()) if t.trained and t.trained.version < version]:
            self._drop_kept(ordinal)

    # --- a new lineage ----------------------------------------------------------------------------------------------

    def new_lineage(self, parent: Weights | None, limits: Limits) -> int:
        """Fence in O(1); `sweep_chunk` then does the rest in bounded pieces."""
        origin = parent if parent is not None else Weights(0, 0)
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

    # --- weights, evaluation, end -----------------------------------------------------------------------------------

    def announce(self, weights: Weights, document: Mapping[str, Any]) -> None:
        self._check_lineage(weights.lineage)
        if weights.version > self.version:
            raise BufferError(
                f"weights of version {weights.version} announced before their commit; V is {self.version}"
            )
        self.announced = (weights, dict(document))
        self._wake_members()

    def claim_evaluation(self, member: Member, request_id: str) -> bool:
        self._member(member)
        if self.evaluation is None or self.evaluation.get("id") != request_id:
            return False
        if self.evaluation_claim not in ("", member.incarnation):
            return False
        self.evaluation_claim = member.incarnation
        return True

    def request_evaluation(self, request: Mapping[str, Any]) -> None:
        self.evaluation, self.evaluation_claim = dict(request), ""
        self._wake_members()

    def report_evaluation(self, request_id: str, result: Mapping[str, Any]) -> None:
        self.results[request_id] = dict(result)
        if self.evaluation is not None and self.evaluation.get("id") == request_id:
            self.evaluation, self.evaluation_claim = None, ""
        self.wakes.add(f"result:{request_id}")

    def finish(self, error: str | None) -> None:
        self.phase, self.error = "ended", error
        self._wake_members()

    def _wake_members(self) -> None:
        self.wakes.update(f"nudge:{incarnation}" for incarnation in self.members)

    def _wake_learner(self) -> None:
        if self.learner_waits:
            self.wakes.add("learner")

    def counts(self) -> dict[State, int]:
        found = dict.fromkeys(State, 0)
        for ticket in self.all.values():
            found[ticket.state] += 1
        return found
