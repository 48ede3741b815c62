"""The reference model's state: what one run's buffer knows, and the sums that every act keeps true.

    live:  returned -> issued -> held -> leased          terminal: trained, stale, filtered, failed
              ^----------+--------+-------+  (collector lost, rewind, release)

Every public method of the model is one atomic act at the time that `at` was told. Nothing fires by itself: acts that a
client may have to repeat return in how many seconds repeating could help.

Two times: `stamp` is the store's own clock, unix seconds, for people; `now` decides who is late. It follows the clock,
but an act moves it by CLOCK_STEP_S at most and never back, so that a clock that is set, or a store that was away, takes
nobody's work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from asyncrl.buffers.base import Fenced, GroupHeader, Member, PutResult, State, UnknownMember
from asyncrl.buffers.limits import Limits
from asyncrl.staleness import Lineages, Weights, due_test, promised

GROUP_TIMES = 64  # recent groups whose median sets the straggler deadline: enough to be steady, few enough to sort
STRAGGLER_FACTOR = 10.0  # x the median: beyond it a group is broken rather than long
STRAGGLER_FLOOR_S = 60.0  # short groups have noisy medians; nobody minds waiting a minute once
ROOT = Weights(0, 0)  # the initial weights, before any learner
CLOCK_STEP_S = 5.0  # longer than any pause between acts while someone lives: collectors beat every two seconds
SETTLE_S = 2.0  # a collector beats so often, and asks again then; weights of one host are active in milliseconds
REQUEUES = 3  # times a ticket may be over age under `requeue`; then it is stale, or one that is always late never ends
QUARANTINE = 8  # payloads that are kept to be looked at; the oldest gives way
SWEEP_CHUNK = 500  # tickets a rewind looks at in one atomic act, so that the server is never blocked for long


class Work(NamedTuple):
    """What went into a group."""

    tokens: int
    seconds: float  # of collectors
    reward: float | None = None  # mean over scored members
    length: float = 0.0  # mean tokens of a member; 0: not known

    @classmethod
    def of(cls, header: GroupHeader) -> Work:
        return cls(header.tokens, header.seconds, header.reward, header.length)


NOTHING = Work(0, 0.0)


@dataclass(slots=True)
class TicketState:
    ordinal: int
    state: State
    attempt: int = 0
    reason: str = ""
    owner: str = ""  # incarnation
    owner_name: str = ""
    issued_for: Weights = ROOT
    began: float = 0.0  # `now` at issue
    times: dict[str, float] = field(default_factory=dict)  # issued, put, leased, ended: stamps
    progress: int = 0
    progress_at: float = 0.0
    losses: int = 0
    requeues: int = 0
    left: int = 0  # uses it still owes, the one it is leased for included
    uses: list[Weights] = field(default_factory=list)  # (lineage, step) of those it had
    header: GroupHeader | None = None
    answer: PutResult | None = None  # what the put or fail of this attempt was answered, for a repeat
    size: int = 0
    ended_at: Weights | None = None  # (lineage, V) when it became terminal
    last: tuple[str, int] = ("", -1)  # owner and attempt of the last put or fail, to answer a repeat

    @property
    def last_use(self) -> Weights | None:
        return self.uses[-1] if self.uses else None


@dataclass(slots=True)
class MemberState:
    member: Member
    serving: Weights | None = None
    checksum: str = ""
    beat_at: float = 0.0
    seq: int = -1
    want: int = 0
    asked: float = 0.0  # stamp of the request it waits with
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
    """No answer yet: which tickets are waited for, and in how many seconds asking again could help."""

    for_ordinals: tuple[int, ...]
    within_s: float


class Common:
    """State and what all acts share. Whom an act wakes is in `wakes`: "learner", "tickets:INCARNATION", ..."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.now = 0.0
        self.stamp: float | None = None
        self.version = 0
        self.moved_at: float | None = None  # `now` of the last commit
        self.lineage = 0
        self.tree = Lineages({})
        self.phase = "running"
        self.sweep: int | None = None  # next ordinal a rewind looks at
        self.from_nothing = False  # ... which starts the run again: rows that have left come back
        self.sweep_dues: dict[int, int] = {}
        self.next_ordinal = 0
        self.all: dict[int, TicketState] = {}
        self.live: dict[int, TicketState] = {}  # issued, held, leased
        self.returned: set[int] = set()
        self.dues: dict[int, int] = {}  # due step -> uses that issued and held tickets owe
        self.members: dict[str, MemberState] = {}
        self.waiters: dict[str, None] = {}  # incarnations in order of asking
        self.leased: LeaseState | None = None
        self.next_lease_attempt = 0
        self.commits: dict[int, int] = {}  # step -> lineage that committed it
        self.checkpoint: int | None = None
        self.payload: dict[int, bytes] = {}
        self.kept: dict[int, TicketState] = {}  # trained, payload kept for a rewind
        self.aside: dict[str, bytes] = {}  # quarantined payloads, oldest first
        self.quarantined = 0
        self.covered = 0  # version of the oldest checkpoint: what ended before it is settled
        self.gone: dict[str, int] = {}  # state/reason -> rows in the archive's ledger
        self.gone_to = 0  # no rewind behind this version: rows it would need are gone
        self.reserved = self.held_bytes = self.kept_bytes = 0
        self.group_times: deque[float] = deque(maxlen=GROUP_TIMES)
        self.learner_waits: float | None = None  # stamp since when
        self.waiting: Wait | None = None
        self.reasons: dict[str, int] = {}
        self.lost_tokens: dict[str, int] = {}
        self.lost_seconds: dict[str, float] = {}
        self.returns: dict[str, int] = {}
        self.rewards: dict[str, tuple[float, int]] = {}  # state/reason -> sum and number of known rewards
        self.lengths: dict[str, tuple[float, int]] = {}
        self.filtered_in_row = 0
        self.refused_puts = 0
        self.announced: tuple[Weights, dict[str, Any]] | None = None
        self.announcements = 0
        self.verify = ""
        self.evaluation: dict[str, Any] | None = None
        self.evaluation_claim = ""
        self.results: dict[str, dict[str, Any]] = {}
        self.error: str | None = None
        self.wakes: set[str] = set()

    def at(self, clock: float) -> None:
        """The time of the acts that follow, by the store's clock (unix seconds)."""
        if self.stamp is not None:
            self.now += min(max(0.0, clock - self.stamp), CLOCK_STEP_S)
        self.stamp = clock

    @property
    def clock(self) -> float:
        assert self.stamp is not None, "`at` comes before every act"
        return self.stamp

    def _member(self, member: Member) -> MemberState:
        try:
            return self.members[member.incarnation]
        except KeyError:
            raise UnknownMember(f"collector {member.name!r} ({member.incarnation}) is not known to the run") from None

    def _alive(self, member: MemberState) -> bool:
        return self.now - member.beat_at <= self.limits.member_timeout_s

    def _check_lineage(self, lineage: int) -> None:
        if lineage != self.lineage:
            raise Fenced(f"learner of lineage {lineage} was replaced by lineage {self.lineage}; it must stop")

    def counts(self) -> dict[State, int]:
        found = dict.fromkeys(State, 0)
        for ticket in self.all.values():
            found[ticket.state] += 1
        for key, rows in self.gone.items():
            found[State(key.partition("/")[0])] += rows
        return found

    def edge(self, ticket: TicketState) -> int:
        """`lo` of the contract: what a ticket's age is counted from."""
        if ticket.header is None:
            return ticket.issued_for.version
        return ticket.header.newest if self.limits.over_age == "mask" else ticket.header.oldest

    def _owed(self, ticket: TicketState) -> range:
        """When what a live ticket is promised is due; the use it is leased for counts no more."""
        owed = self._promised(self.edge(ticket), ticket.left, used=bool(ticket.uses))
        return owed[1:] if ticket.state is State.LEASED else owed

    def _promised(self, lo: int, uses: int, *, used: bool = False) -> range:
        return promised(lo, self.limits.max_age, uses, used=used, fresh_per_step=self.limits.fresh_per_step)

    def _due_test(self, extra: Mapping[int, int]) -> bool:
        """Contract 1: with step V's batch leased, count from V + 1; `dues` leaves leased tickets out already."""
        owed = dict(self.dues)
        for step, uses in extra.items():
            owed[step] = owed.get(step, 0) + uses
        first = self.version + (1 if self.leased is not None else 0)
        return due_test(owed, first_step=first, groups_per_step=self.limits.groups_per_step)

    def _owe(self, steps: Iterable[int], uses: int) -> None:
        for step in steps:
            self.dues[step] = self.dues.get(step, 0) + uses
            if self.dues[step] == 0:
                del self.dues[step]

    def _wake_members(self) -> None:
        self.wakes.update(f"nudge:{incarnation}" for incarnation in self.members)

    def _more_to_come(self) -> bool:
        if self.returned or any(t.state is State.ISSUED for t in self.live.values()):
            return True
        return self.limits.max_tickets is None or self.next_ordinal < self.limits.max_tickets

    def _wake_learner(self) -> None:
        """No batch stands before B groups are held, but for the last one: until then there is nothing to look at."""
        held = sum(t.state is State.HELD for t in self.live.values())
        if self.learner_waits is not None and (held >= self.limits.groups_per_step or not self._more_to_come()):
            self.wakes.add("learner")
