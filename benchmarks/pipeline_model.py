"""What physics allows: a discrete-event model of engine slots, admission, the age bound and one learner.

Time unit: one learner step. B groups are trained per step. A group is ready when the longest of its G members is;
lengths are log-normal and those of the simulated engine, to the last bit. There are c x B x G request slots, and one
unit of length takes so long that a group lasts c steps on average.

Rules, as the buffer has them. Admission: at most (k + 1) x B groups issued and not yet freed; a step frees B of them
when the version moves. `wait`: a step starts only if no unfinished group would be older than k at the next one. `drop`:
groups over age are evicted, unfinished ones cancelled. `requeue`: the same, but they are started again, first of all,
three times at most; they are as long as before. `mask`: a group is over age once its newest token is, which an
unfinished one's never is; tokens over age are left out. Order: the oldest ready groups among the lookahead x B oldest
live ones.

What is left out: every cost of the real thing. So its efficiency is the limit an implementation is compared with.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean
from typing import Literal

from asyncrl.buffers.limits import OverAge
from asyncrl.buffers.reference.common import REQUEUES
from asyncrl.collectors.engines.simulated import relative_length

Holder = Literal["group", "member"]
"""What holds a slot. member: each request until it ends, as the engines do. group: all G slots until the last member
ends, as where a batch of samples runs as one."""

CALIBRATION_GROUPS = 4000


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One setting. `steps` are simulated from an empty pipeline."""

    k: int  # max_trajectory_age
    c: float = 1.0  # steps a group lasts on average
    B: int = 32  # groups_per_step
    G: int = 8  # group_size
    cv: float = 1.0  # of the lengths
    lookahead: float = 1.5
    policy: OverAge = "wait"
    steps: int = 600
    seed: int = 0
    holder: Holder = "member"

    @property
    def slots(self) -> int:
        """Requests that run at once."""
        return max(1, round(self.c * self.B)) * self.G

    @property
    def scale(self) -> float:
        """Steps that one unit of relative length takes."""
        return self.c / _mean_group(self.seed, self.G, self.cv)


@dataclass(frozen=True, slots=True)
class Outcome:
    """efficiency: share of the time the learner was busy. Ages are of groups' oldest trained tokens, at the step that
    trained them. Lengths are of groups' longest members."""

    efficiency: float
    mean_age: float
    max_age: int
    lost: float  # groups lost / (lost + trained)
    length_ratio: float  # mean length of trained groups / that of started ones
    lost_length_ratio: float | None  # mean length of lost groups / that of trained ones; None: none were lost
    masked: float  # share of the trained groups' tokens that were over age, and left out
    attempts: float  # how often a group was started, mean


@cache
def member_lengths(seed: int, ticket: int, group_size: int, cv: float) -> tuple[float, ...]:
    """Relative lengths (mean 1) of a group's members."""
    return tuple(relative_length(seed, ticket, member, cv) for member in range(group_size))


def group_length(setting: Pipeline, ticket: int) -> float:
    """Relative length of a group's longest member."""
    return max(member_lengths(setting.seed, ticket, setting.G, setting.cv))


@cache
def _mean_group(seed: int, group_size: int, cv: float) -> float:
    groups = range(CALIBRATION_GROUPS)
    return sum(max(member_lengths(seed, ticket, group_size, cv)) for ticket in groups) / CALIBRATION_GROUPS


@dataclass(slots=True)
class _Group:
    issued: int  # version
    started: float  # time
    lengths: tuple[float, ...]
    slots: int  # still held
    newest: int = 0  # version that sampled its last token

    @property
    def length(self) -> float:
        return max(self.lengths)


@dataclass(slots=True)
class _State:
    """The pipeline between two events."""

    setting: Pipeline
    free: int
    now: float = 0.0
    version: int = 0
    next_ticket: int = 0
    ends: list[tuple[float, int, int]] = field(default_factory=list)  # heap of (time, ticket, slots freed)
    running: dict[int, _Group] = field(default_factory=dict)
    ready: dict[int, _Group] = field(default_factory=dict)
    leased: list[int] = field(default_factory=list)  # their room is freed when the version moves
    returned: list[int] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)  # ticket -> how often
    versions: list[float] = field(default_factory=lambda: [0.0])  # when each came
    trained: list[float] = field(default_factory=list)  # lengths
    lost: list[float] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    tokens: float = 0.0  # of the trained groups
    masked: float = 0.0

    def admit(self) -> None:
        """Start groups while admission and slots allow: returned ones first, for which only older ones count."""
        s = self.setting
        while self.free >= s.G:
            ticket = min(self.returned, default=self.next_ticket)
            older = len(self.running) + len(self.ready) + len(self.leased)
            if self.returned:
                older = sum(other < ticket for other in (*self.running, *self.ready, *self.leased))
            if older >= (s.k + 1) * s.B:
                return
            lengths = member_lengths(s.seed, ticket, s.G, s.cv)
            ends = [(max(lengths), s.G)] if s.holder == "group" else [(length, 1) for length in lengths]
            for length, slots in ends:
                heapq.heappush(self.ends, (self.now + length * s.scale, ticket, slots))
            self.running[ticket] = _Group(self.version, self.now, lengths, s.G)
            self.starts[ticket] = self.starts.get(ticket, 0) + 1
            self.free -= s.G
            if ticket == self.next_ticket:
                self.next_ticket += 1
            else:
                self.returned.remove(ticket)

    def end_member(self) -> None:
        """The next end: slots become free, and the group is ready if it was the last of them."""
        _, ticket, slots = heapq.heappop(self.ends)
        group = self.running[ticket]
        group.slots -= slots
        self.free += slots
        if group.slots == 0:
            group.newest = self.version
            self.ready[ticket] = self.running.pop(ticket)

    def evict(self) -> None:
        """What would be over age at the step that starts now is lost, or starts again."""
        s = self.setting
        for held in (self.ready,) if s.policy == "mask" else (self.ready, self.running):
            for ticket, group in list(held.items()):
                if self.version - (group.newest if s.policy == "mask" else group.issued) <= s.k:
                    continue
                self.free += held.pop(ticket).slots
                if s.policy == "requeue" and self.starts[ticket] <= REQUEUES:
                    self.returned.append(ticket)
                else:
                    self.lost.append(group.length)
        self.ends = [end for end in self.ends if end[1] in self.running]
        heapq.heapify(self.ends)

    def batch(self) -> list[int] | None:
        """The tickets a step would train now, None if it has to wait."""
        s = self.setting
        if s.policy == "wait" and any(self.version - group.issued >= s.k for group in self.running.values()):
            return None
        visible = set(sorted([*self.ready, *self.running])[: max(s.B, int(s.lookahead * s.B))])
        chosen = [ticket for ticket in sorted(self.ready) if ticket in visible][: s.B]
        return chosen if len(chosen) == s.B else None

    def train(self, batch: list[int]) -> None:
        """Take a batch out, and count what it trains."""
        s = self.setting
        bound = self.versions[max(0, self.version - s.k)]  # tokens from before that are over age
        for ticket in batch:
            group = self.ready.pop(ticket)
            age = self.version - group.issued
            self.ages.append(min(age, s.k) if s.policy == "mask" else age)
            self.trained.append(group.length)
            self.tokens += sum(group.lengths)
            early = (bound - group.started) / s.scale
            self.masked += sum(min(length, max(0.0, early)) for length in group.lengths)
        self.leased = batch


def simulate(setting: Pipeline) -> Outcome:
    """Run the model. Raises RuntimeError if the setting deadlocks, which would be a fault of the rules."""
    state = _State(setting, free=setting.slots)
    state.admit()
    step_ends: float | None = None
    done = 0
    while done < setting.steps:
        if step_ends is None:
            if setting.policy != "wait":
                state.evict()
                state.admit()
            if (batch := state.batch()) is not None:
                state.train(batch)
                step_ends = state.now + 1.0
        next_end = state.ends[0][0] if state.ends else math.inf
        state.now = min(next_end, math.inf if step_ends is None else step_ends)
        if state.now == math.inf:
            raise RuntimeError(f"{setting} deadlocks at version {state.version}")
        if next_end == state.now:
            state.end_member()
        else:
            step_ends = None
            done += 1
            state.version += 1
            state.versions.append(state.now)
            state.leased = []
        state.admit()
    started = [group_length(setting, ticket) for ticket in state.starts]
    return Outcome(
        efficiency=done / state.now,
        mean_age=fmean(state.ages),
        max_age=max(state.ages),
        lost=len(state.lost) / (len(state.lost) + len(state.trained)),
        length_ratio=fmean(state.trained) / fmean(started),
        lost_length_ratio=fmean(state.lost) / fmean(state.trained) if state.lost else None,
        masked=state.masked / state.tokens,
        attempts=fmean(state.starts.values()),
    )
