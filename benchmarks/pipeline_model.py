"""What physics allows: a discrete-event model of engine slots, admission, the age bound and one learner.

Time unit: one learner step. B groups are trained per step. A group is ready when the longest of its G members is;
lengths are log-normal and those of the simulated engine, to the last bit. There are c x B x G request slots, and one
unit of length takes so long that a group lasts c steps on average.

Rules, as the buffer has them. Admission: at most (k + 1) x B groups issued and not yet freed; a step frees B of them
when the version moves. `wait`: a step starts only if no unfinished group would be older than k at the next one. `drop`:
groups over age are evicted, unfinished ones cancelled. Order: the oldest ready groups among the lookahead x B oldest
live ones.

What is left out: every cost of the real thing. So its efficiency is the limit an implementation is compared with.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from asyncrl.buffers.base import OverAge
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
    """efficiency: share of the time the learner was busy. Ages are of groups, at the version they were trained from."""

    efficiency: float
    mean_age: float
    max_age: int
    lost: float  # groups lost / (lost + trained)
    length_ratio: float  # mean length of trained groups / that of started ones


@cache
def member_lengths(seed: int, ticket: int, group_size: int, cv: float) -> tuple[float, ...]:
    """Relative lengths (mean 1) of a group's members."""
    return tuple(relative_length(seed, ticket, member, cv) for member in range(group_size))


@cache
def _mean_group(seed: int, group_size: int, cv: float) -> float:
    groups = range(CALIBRATION_GROUPS)
    return sum(max(member_lengths(seed, ticket, group_size, cv)) for ticket in groups) / CALIBRATION_GROUPS


@dataclass(slots=True)
class _Group:
    issued: int  # version
    length: float  # of its longest member
    slots: int  # still held


@dataclass(slots=True)
class _State:
    """The pipeline between two events."""

    setting: Pipeline
    free: int
    now: float = 0.0
    version: int = 0
    next_ticket: int = 0
    outstanding: int = 0
    lost: int = 0
    ends: list[tuple[float, int, int]] = field(default_factory=list)  # heap of (time, ticket, slots freed)
    running: dict[int, _Group] = field(default_factory=dict)
    ready: dict[int, _Group] = field(default_factory=dict)
    started: list[float] = field(default_factory=list)  # lengths
    trained: list[float] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)

    def admit(self) -> None:
        """Start groups while admission and slots allow."""
        s = self.setting
        while self.outstanding < (s.k + 1) * s.B and self.free >= s.G:
            ticket, lengths = self.next_ticket, member_lengths(s.seed, self.next_ticket, s.G, s.cv)
            longest = max(lengths)
            ends = [(longest, s.G)] if s.holder == "group" else [(length, 1) for length in lengths]
            for length, slots in ends:
                heapq.heappush(self.ends, (self.now + length * s.scale, ticket, slots))
            self.running[ticket] = _Group(self.version, longest, s.G)
            self.started.append(longest)
            self.free -= s.G
            self.next_ticket += 1
            self.outstanding += 1

    def end_member(self) -> None:
        """The next end: slots become free, and the group is ready if it was the last of them."""
        _, ticket, slots = heapq.heappop(self.ends)
        group = self.running[ticket]
        group.slots -= slots
        self.free += slots
        if group.slots == 0:
            self.ready[ticket] = self.running.pop(ticket)

    def evict(self) -> None:
        """`drop`: what would be over age at the step that starts now is lost."""
        for held in (self.ready, self.running):
            for ticket in [t for t, group in held.items() if self.version - group.issued > self.setting.k]:
                self.free += held.pop(ticket).slots
                self.lost += 1
                self.outstanding -= 1
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


def simulate(setting: Pipeline) -> Outcome:
    """Run the model. Raises RuntimeError if the setting deadlocks, which would be a fault of the rules."""
    state = _State(setting, free=setting.slots)
    state.admit()
    step_ends: float | None = None
    done = 0
    while done < setting.steps:
        if step_ends is None:
            if setting.policy == "drop":
                state.evict()
                state.admit()
            if (batch := state.batch()) is not None:
                for ticket in batch:
                    group = state.ready.pop(ticket)
                    state.ages.append(state.version - group.issued)
                    state.trained.append(group.length)
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
            state.outstanding -= setting.B
        state.admit()
    return Outcome(
        efficiency=done / state.now,
        mean_age=_mean(state.ages),
        max_age=max(state.ages),
        lost=state.lost / (state.lost + len(state.trained)),
        length_ratio=_mean(state.trained) / _mean(state.started),
    )


def _mean(values: list[int] | list[float]) -> float:
    return sum(values) / len(values)
