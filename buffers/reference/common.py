"""The reference model's state: what one run's buffer knows, and the sums that every act keeps true.

    live:  returned -> issued -> held -> leased          terminal: trained, stale, filtered, failed
              ^----------+--------+-------+  (collector lost, rewind, release)

Every public method of the model is one atomic act at time `now` (unix seconds). Nothing fires by itself: acts that a
client may have to repeat return the next deadline at which repeating could help.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.buffers.base import Fenced, GroupHeader, Limits, Member, PutResult, State, UnknownMember
from asyncrl.staleness import Lineages, Weights, due_test

GROUP_TIMES = 64  # recent groups whose median sets the straggler deadline: enough to be steady, few enough to sort
STRAGGLER_FACTOR = 10.0  # x the median: beyond it a group is broken rather than long
STRAGGLER_FLOOR_S = 60.0  # short groups have noisy medians; nobody minds waiting a minute once
ROOT = Weights(0, 0)  # the initial weights, before any learner
SWEEP_CHUNK = 500  # tickets a rewind looks at in one atomic act, so that the server is never blocked for long


@dataclass(slots=True)
class TicketState:
    ordinal: int
    state: State
    attempt: int = 0
    reason: str = ""
    owner: str = ""  # incarnation
    owner_name: str = ""
    issued_for: Weights = ROOT
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


class Common:
    """State and what all acts share. Whom an act wakes is in `wakes`: "learner", "tickets:INCARNATION", ..."""

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

    def _member(self, member: Member) -> MemberState:
        try:
            return self.members[member.incarnation]
        except KeyError:
            raise UnknownMember(f"collector {member.name!r} ({member.incarnation}) is not known to the run") from None

    def _alive(self, member: MemberState, now: float) -> bool:
        return now - member.beat_at <= self.limits.member_timeout_s

    def _check_lineage(self, lineage: int) -> None:
        if lineage != self.lineage:
            raise Fenced(f"learner of lineage {lineage} was replaced by lineage {self.lineage}; it must stop")

    def counts(self) -> dict[State, int]:
        found = dict.fromkeys(State, 0)
        for ticket in self.all.values():
            found[ticket.state] += 1
        return found

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

    def _wake_members(self) -> None:
        self.wakes.update(f"nudge:{incarnation}" for incarnation in self.members)

    def _wake_learner(self) -> None:
        if self.learner_waits:
            self.wakes.add("learner")
