"""What the buffer does: its operations, its words, its errors. Contract: `docs/buffer.md`.

Each operation is atomic and idempotent by identity, so that a call whose reply was lost is simply made again. No
client polls: a call that has to wait is woken by the operation that ends the wait, and by the next deadline at the
latest, since nothing in a store fires by itself.

| who waits         | for what                                   | who ends the wait                         |
|-------------------|--------------------------------------------|-------------------------------------------|
| collector/tickets | an admissible ticket                       | commit, put, fail, a collector lost, beat |
| collector/nudge   | new weights, revoked tickets, an evaluation | announce, commit, new_lineage, finish    |
| learner/lease     | a batch that stands                        | put, fail, a collector lost               |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

from asyncrl.buffers.limits import Limits
from asyncrl.staleness import Weights

PROTOCOL_VERSION = 4
"""Version of keys, scripts and replies together. Another one is refused by name, never guessed at."""


class State(StrEnum):
    """Where a ticket stands. In every atomic snapshot each ticket is in exactly one of these."""

    RETURNED = "returned"  # waiting to be issued again
    ISSUED = "issued"  # a collector generates it
    HELD = "held"  # put, waiting for a learner
    LEASED = "leased"  # in a batch that is being trained
    TRAINED = "trained"
    STALE = "stale"  # over age, straggler, end of run
    FILTERED = "filtered"  # carries nothing to learn from, by the recipe's own choice
    FAILED = "failed"  # bad data, or it lost too many collectors


FORFEITED = "forfeited/"
"""Prefix of reasons that count uses, not tickets: a group that was trained less often than `max_uses`."""

LIVE = (State.RETURNED, State.ISSUED, State.HELD, State.LEASED)
TERMINAL = (State.TRAINED, State.STALE, State.FILTERED, State.FAILED)


class BufferError(Exception):
    """The store or the run cannot serve this call; the message names the value and the fix."""


class Fenced(BufferError):
    """A newer learner has taken the run over; this process must stop and apply nothing more."""


class UnknownMember(BufferError):
    """The run does not know this incarnation (store lost, or a newer incarnation replaced it): join again."""


class Damaged(BufferError):
    """Groups of a lease are not what was put. `groups`: ordinal -> what is wrong with it."""

    def __init__(self, groups: Mapping[int, str]) -> None:
        super().__init__("; ".join(groups.values()))
        self.groups = groups


@dataclass(frozen=True, slots=True)
class Member:
    """A collector process. A new incarnation under the same name returns what the old one held."""

    name: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Ticket:
    """Permission to generate one group: ordinal n of the run's prompt order, attempt by attempt."""

    ordinal: int
    attempt: int
    issued_for: Weights  # what the collector served when it was issued
    issued: float  # the store's clock, unix seconds


@dataclass(frozen=True, slots=True)
class GroupHeader:
    """What the store needs to know of a group; everything else travels in the payload beside the script.

    oldest, newest: versions over the trainable tokens. weights: the newest span's. spans: every (lineage, version) it
    contains, each of which must be an ancestor. digest: xxh3_64 hex of the payload, checked when it is fetched.
    """

    ordinal: int
    attempt: int
    weights: Weights
    oldest: int
    newest: int
    spans: tuple[Weights, ...]
    tokens: int
    seconds: float  # collector-seconds this group took
    digest: str
    reward: float | None = None  # mean over scored members; for the metric of lost against trained
    length: float = 0.0  # mean sampled tokens per member


PutResult = Literal["held", "duplicate", "returned", "ended", "refused"]
FailKind = Literal["data", "filtered", "infrastructure", "cancelled"]


@dataclass(frozen=True, slots=True)
class Beat:
    """The store's answer to a heartbeat."""

    step_version: int  # V
    lineage: int
    announced: Weights | None  # newest weights to stage, or None before the first
    revoked: tuple[tuple[int, int], ...]  # (ordinal, attempt) no longer owned: abort them
    evaluation: Mapping[str, Any] | None  # a pending request this member may claim
    phase: str  # running | rewinding | ended
    announcements: int = 0  # made so far: another number means that `announcement` has something new to read
    verify: str = ""  # the last request to prove what is served (`request_verification`), "" if there was none


@dataclass(frozen=True, slots=True)
class Lease:
    """The batch of step `step` (= V when granted). Asking again gives the same one."""

    lineage: int
    step: int
    attempt: int  # of this lease: `release` raises it
    ordinals: tuple[int, ...]
    headers: tuple[GroupHeader, ...]
    uses: tuple[int, ...] = ()  # steps that have trained each of them before: 0 is a fresh one


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why there is no batch yet, in words a person can act on."""

    for_ordinals: tuple[int, ...]
    members: tuple[str, ...]  # collectors that hold those tickets
    reason: str
    since: float = 0.0  # unix seconds, the store's clock


@dataclass(frozen=True, slots=True)
class Blocked:
    """A party that waits in the store right now, for `asyncrl status`."""

    who: str  # "learner", or a collector's name
    waits_for: str  # the predicate
    since: float  # unix seconds, the store's clock
    unblocked_by: str  # who could make it true


@dataclass(frozen=True, slots=True)
class Commit:
    """The answer to a commit, the same however often it is asked."""

    version: int  # V after it
    repeated: bool
    ended: bool  # this was the last step; every live ticket is stale, `run_end`


@dataclass(frozen=True, slots=True)
class MemberStats:
    """A collector as the store knows it."""

    name: str
    incarnation: str
    serving: Weights | None
    checksum: str
    alive: bool
    beat_age_s: float  # seconds since its last beat
    issued: int  # tickets it works on
    progress: Mapping[str, Any] = field(default_factory=dict)  # the `info` of its last beat


@dataclass(frozen=True, slots=True)
class Stats:
    """One atomic snapshot."""

    run: str
    phase: str
    lineage: int
    version: int
    tickets: int  # ever issued; the sum of `states`
    states: Mapping[State, int]
    reasons: Mapping[str, int]  # "stale/over_age" -> tickets
    lost_tokens: Mapping[str, int]  # by the same keys: tokens
    lost_seconds: Mapping[str, float]  # by the same keys: collector-seconds
    refused_puts: int
    bytes_reserved: int
    bytes_held: int
    bytes_kept: int  # payloads kept for a rewind
    members: Sequence[MemberStats]
    waiting: Waiting | None  # what the learner waits for now
    checkpoint: int | None  # newest version covered by a checkpoint
    forks: Mapping[int, Weights]  # lineage -> (parent lineage, version where it forked)
    dues: Mapping[int, int]  # due step -> uses that issued and held tickets owe
    error: str | None  # why the run ended, if it failed
    # lost_tokens and lost_seconds also have "returned/<reason>": work that was thrown away and done again.
    returns: Mapping[str, int]  # reason -> times that a ticket went back to be issued again
    lost_reward: Mapping[str, float]  # mean reward of the groups that ended so, where known; "trained/trained" as well
    lost_length: Mapping[str, float]  # mean tokens of a member, by the same keys; of cancelled work: so far
    filtered_in_row: int  # tickets that ended as `filtered` since a group was last held
    quarantined: int  # payloads that were damaged or foreign, and set aside
    archived: Mapping[str, int]  # "state/reason" -> rows that moved to the archive's ledger; `states` counts them too
    blocked: Sequence[Blocked]  # who waits right now
    time: float  # of this snapshot: unix seconds, the store's clock

    @property
    def lost(self) -> dict[str, int]:
        """Tickets that ended without being trained, by state and reason."""
        trained = (f"{State.TRAINED}/", FORFEITED)
        return {reason: n for reason, n in self.reasons.items() if n and not reason.startswith(trained)}


@dataclass(frozen=True, slots=True)
class TicketRow:
    """One ledger row, for `audit`, `ls` and `show`."""

    ordinal: int
    state: State
    attempt: int
    reason: str
    trained: Weights | None  # (lineage, step) that trained it last
    owner: str
    lo: int | None
    has_payload: bool
    size: int  # bytes of the payload, 0 where there is none
    uses: tuple[Weights, ...] = ()  # every (lineage, step) that trained it
    losses: int = 0  # collectors it has lost
    requeues: int = 0  # times it was returned because it was over age
    left: int = 0  # uses it still owes
    times: Mapping[str, float] = field(default_factory=dict)  # issued, put, leased, ended: unix s, the store's clock


class Buffer(Protocol):
    """One run's buffer. Implementations: `store.RedisBuffer` (production) and `memory.MemoryBuffer` (reference)."""

    limits: Limits

    # --- collectors -------------------------------------------------------------------------------------------------
    async def join(self, member: Member, info: Mapping[str, Any]) -> None:
        """Register an incarnation; an older one of the same name is gone and its tickets are returned."""

    async def leave(self, member: Member) -> None:
        """End an incarnation cleanly: its tickets are returned at once, without counting as a loss."""

    async def tickets(self, member: Member, *, seq: int, want: int, wait_s: float) -> list[Ticket]:
        """Up to `want` tickets for what the member can start now; waits at most `wait_s` for the first. `seq` must grow
        with each new request; the same seq is answered with the same tickets (a lost reply is not granted twice).
        [] = none yet: ask again with the same seq. Raises UnknownMember."""

    async def beat(
        self,
        member: Member,
        *,
        serving: Weights | None,
        checksum: str,
        progress: Mapping[tuple[int, int], int],
        info: Mapping[str, Any],
    ) -> Beat:
        """Say what is alive: every owned (ordinal, attempt) with a count that grows with each token, tool call or
        score. `serving` is the lowest (lineage, version) over the member's engines; one that is not an ancestor of the
        current lineage counts as serving nothing. Raises UnknownMember."""

    async def nudge(self, member: Member, wait_s: float) -> None:
        """Return when a beat would tell something new, or after `wait_s` seconds."""

    async def put(self, member: Member, header: GroupHeader, payload: bytes) -> PutResult:
        """Hand a finished group over. `returned`: not usable (rewound weights, older than promised), will be issued
        again. `ended`: terminal (over age on arrival, too large). `refused`: another attempt or owner, counted."""

    async def fail(
        self,
        member: Member,
        ordinal: int,
        attempt: int,
        *,
        kind: FailKind,
        reason: str,
        tokens: int,
        seconds: float,
        reward: float | None = None,
        length: float = 0.0,
    ) -> PutResult:
        """End a ticket without a group: `data` and `filtered` are terminal, `infrastructure` returns it (bounded by
        max_losses), `cancelled` returns it without counting a loss. `tokens`, `seconds`, `reward` (mean over scored
        members) and `length` (mean tokens of a member): what is lost by that."""

    # --- learner ----------------------------------------------------------------------------------------------------
    async def lease(self, lineage: int, step: int, *, wait_s: float) -> Lease | Waiting:
        """The batch of `step`, waiting at most `wait_s` seconds for it. An empty `Lease.ordinals` = nothing is live and
        nothing can come. Raises Fenced."""

    async def payloads(self, lease: Lease) -> list[bytes]:
        """The groups of a lease in its order. Raises Damaged if some are missing or their digest differs."""

    async def release(self, lineage: int, step: int) -> bool:
        """Give a batch back before any of it was applied; the next lease of that step has the next attempt number."""

    async def commit(self, lineage: int, step: int, *, skipped: bool = False) -> Commit:
        """The one atomic act that marks a batch trained and moves V to step + 1. Raises Fenced."""

    async def quarantine(self, lineage: int, step: int, ordinals: Sequence[int], reason: str) -> None:
        """These groups of the leased batch are damaged or foreign. Their payloads are set aside for inspection (the
        newest few), their tickets returned as a loss, and the lease is given back: lease again."""

    async def checkpointed(self, lineage: int, version: int, *, oldest: int | None = None) -> None:
        """A checkpoint of `version` is on disk; its commit was acknowledged before. `oldest`: version of the oldest one
        that is kept on this branch (None: this one). What no rewind can need goes: payloads now, rows by `archived`."""

    async def settled(self, lineage: int, *, limit: int) -> list[TicketRow]:
        """Up to `limit` terminal rows that no rewind can touch any more, since the oldest checkpoint covers them."""

    async def archived(self, lineage: int, ordinals: Sequence[int]) -> None:
        """These settled rows are in the archive's ledger, synced: they leave the store, which keeps their sums."""

    async def adopt(self, forks: Mapping[int, Weights]) -> None:
        """For a store that lost its newest writes: teach it the lineages it no longer knows, and rewind it to where
        they forked. Raises BufferError where it knows one of them differently."""

    async def recommit(self, lineage: int, step: int, tickets: Sequence[tuple[int, int]]) -> Commit:
        """For such a store: step `step`, which must be its V, trained these (ordinal, attempt), by the learner's own
        archive. Ordinals below them that it does not know are returned. Repeating it is answered, not repeated."""

    async def new_lineage(self, *, parent: Weights | None, limits: Limits) -> int:
        """A learner starts, from weights `parent` (None: the initial ones). Fences the old learner, then rewinds."""

    async def announce(self, weights: Weights, document: Mapping[str, Any]) -> None:
        """Weights can be staged; wakes every collector. `document` says where each transport has which of them, and may
        be announced again with more in it."""

    async def announcement(self) -> tuple[Weights, Mapping[str, Any]] | None:
        """The newest announcement of the current lineage."""

    async def request_verification(self, request_id: str) -> None:
        """Ask every collector to hash what it serves and to say the result in its next beats. Wakes them all; a request
        that comes later takes the place of this one."""

    # --- evaluation, state, inspection ------------------------------------------------------------------------------
    async def request_evaluation(self, request: Mapping[str, Any]) -> None:
        """Ask for an evaluation: `id`, `weights` [lineage, version], and what to run. One pending request at a time."""

    async def claim_evaluation(self, member: Member, request_id: str) -> bool:
        """True for the one member that runs it; a claim of a dead member is free again."""

    async def report_evaluation(self, request_id: str, result: Mapping[str, Any]) -> None:
        """The claimed evaluation's result, JSON values; wakes whoever waits for it."""

    async def evaluation(self, request_id: str, *, wait_s: float) -> Mapping[str, Any] | None:
        """The result, or None after `wait_s` seconds."""

    async def finish(self, *, error: str | None = None) -> None:
        """The run has ended; collectors are told so."""

    async def stats(self) -> Stats:
        """The sums, in one atomic snapshot."""

    async def snapshot(self) -> tuple[Stats, list[TicketRow]]:
        """The sums and every ledger row by ordinal, in one atomic snapshot: what `audit` compares."""

    async def row(self, ordinal: int) -> TicketRow | None:
        """One ledger row; None if the ticket was never issued or its row is in the archive's ledger."""

    async def rows(self, *, states: Sequence[State], start: int = 0, limit: int = 100) -> list[TicketRow]:
        """Rows in these states from ordinal `start` on, by ordinal."""

    async def payload(self, ordinal: int) -> bytes | None:
        """The group of a held or leased ticket as it lies there, unchecked; None where there is none."""

    async def quarantined(self) -> dict[str, bytes]:
        """ "ordinal:attempt" -> payload that was set aside."""

    async def close(self) -> None:
        """Let go of the connection; the run stays in the store."""
