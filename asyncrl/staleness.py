"""The only definition of age, admission, due and order. Pure functions; no I/O, no clock.

Symbols, as in the design and the buffer's contract:

    k   max_trajectory_age: a hard bound, in versions
    B   groups_per_step
    V   version the next step starts from
    s   version a collector serves
    lo  of a ticket: issued -> the version it was issued for; held or leased -> its oldest trainable token's version
    due lo + k: the last step that may train the ticket

The server-side scripts (`buffers/scripts/common.lua`) state the same rules; `tests/buffers` drives both with the same
random operations, so that a difference fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Weights(NamedTuple):
    """The name of one set of weights. Orders by lineage first: (2, 5) is newer than (1, 8)."""

    lineage: int
    version: int


def age(step_version: int, token_version: int) -> int:
    """Age of a token at a step, in versions. Time in the queue counts.

    >>> age(step_version=7, token_version=5)
    2
    """
    return step_version - token_version


def in_window(lo: int, *, version: int, max_age: int) -> bool:
    """Whether the step that starts from `version` may train a group whose oldest trainable token has version `lo`.

    >>> in_window(4, version=5, max_age=1), in_window(3, version=5, max_age=1)
    (True, False)
    """
    return age(version, lo) <= max_age


def due(lo: int, max_age: int) -> int:
    """The last step that may train a ticket: the step whose age reaches the bound."""
    return lo + max_age


def room(*, max_age: int, groups_per_step: int, version: int, serving: int) -> int:
    """How many live tickets of lower ordinal plus its own a collector serving `serving` may see: (1 + k - (V - s)) x B.

    Relative to what the collector serves, so that a lagging one starts less, and one beyond the bound nothing.

    >>> room(max_age=1, groups_per_step=4, version=5, serving=5)
    8
    >>> room(max_age=1, groups_per_step=4, version=5, serving=3)
    0
    """
    return max(0, 1 + max_age - (version - serving)) * groups_per_step


def due_test(owed: Mapping[int, int], *, first_step: int, groups_per_step: int) -> bool:
    """Whether everything owed can still be trained in time: for every j >= 0, the uses due at or before step
    `first_step` + j number at most (j + 1) x B.

    owed: due step -> number of live tickets with that due. One due before `first_step` is already lost and fails it.

    >>> due_test({5: 2, 6: 2}, first_step=5, groups_per_step=2)
    True
    >>> due_test({5: 3}, first_step=5, groups_per_step=2)
    False
    """
    total = 0
    for step in sorted(owed):
        total += owed[step]
        if total > max(0, step - first_step + 1) * groups_per_step:
            return False
    return True


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live ticket as the choice of a batch sees it. `lo` is its promise while issued, its oldest token once held."""

    ordinal: int
    held: bool
    lo: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A batch, or the ordinals the learner waits for. Exactly one of both is non-empty, unless nothing is live."""

    batch: tuple[int, ...] = ()
    waiting_for: tuple[int, ...] = ()


def choose_batch(
    live: Sequence[Candidate],
    *,
    version: int,
    max_age: int,
    groups_per_step: int,
    lookahead: float,
    guard_dues: bool,
    more_to_come: bool,
) -> Choice:
    """Which held tickets step `version` trains. Contract, section 4.

    live: issued and held tickets by ascending ordinal. `lookahead` (1 to 2) x B of the oldest are in sight, and any
    held one that is due now. `guard_dues` (the policy `wait`): the batch stands only if, without it, all else can be
    trained in time; else the ready tickets with the earliest due are tried, lookahead ignored; else the learner waits.
    `more_to_come`: whether a further ticket can be issued or finished; if not, a short batch is the last one.

    >>> held = [Candidate(n, held=True, lo=0) for n in range(3)]
    >>> choose_batch(held, version=0, max_age=0, groups_per_step=2, lookahead=1.5, guard_dues=False, more_to_come=True)
    Choice(batch=(0, 1), waiting_for=())
    """
    visible = max(groups_per_step, int(lookahead * groups_per_step))
    ready = [c for c in live if c.held and in_window(c.lo, version=version, max_age=max_age)]
    late = tuple(c.ordinal for c in live if not c.held)

    def due_now(c: Candidate) -> bool:
        return due(c.lo, max_age) <= version

    in_sight = {c.ordinal for c in live[:visible]}
    first = sorted(
        (c for c in ready if c.ordinal in in_sight or due_now(c)), key=lambda c: (not due_now(c), c.ordinal)
    )[:groups_per_step]
    if len(first) < groups_per_step and not more_to_come and not late and len(ready) <= groups_per_step:
        return Choice(batch=tuple(c.ordinal for c in ready))
    if len(first) == groups_per_step and (not guard_dues or _dues_hold(live, first, version, max_age, groups_per_step)):
        return Choice(batch=tuple(c.ordinal for c in first))
    if guard_dues and len(ready) >= groups_per_step:
        earliest = sorted(ready, key=lambda c: (due(c.lo, max_age), c.ordinal))[:groups_per_step]
        if _dues_hold(live, earliest, version, max_age, groups_per_step):
            return Choice(batch=tuple(c.ordinal for c in earliest))
    return Choice(waiting_for=late)


def _dues_hold(
    live: Iterable[Candidate], batch: Iterable[Candidate], version: int, max_age: int, groups_per_step: int
) -> bool:
    taken = {c.ordinal for c in batch}
    owed: dict[int, int] = {}
    for c in live:
        if c.ordinal not in taken:
            step = due(c.lo, max_age)
            owed[step] = owed.get(step, 0) + 1
    return due_test(owed, first_step=version + 1, groups_per_step=groups_per_step)


@dataclass(slots=True)
class Lineages:
    """The family tree of learner starts: lineage -> (parent, version where it forked). Lineage 0 is the root, before
    any learner."""

    forks: dict[int, tuple[int, int]]

    def is_ancestor(self, name: Weights, current: int) -> bool:
        """Whether weights `name` lie on the path from the current lineage, not beyond a fork.

        >>> tree = Lineages({1: (0, 0), 2: (1, 5)})
        >>> tree.is_ancestor(Weights(1, 5), 2), tree.is_ancestor(Weights(1, 6), 2), tree.is_ancestor(Weights(2, 6), 2)
        (True, False, True)
        """
        limit: int | None = None
        lineage = current
        while True:
            if lineage == name.lineage:
                return limit is None or name.version <= limit
            if lineage not in self.forks:
                return False
            parent, forked = self.forks[lineage]
            limit = forked if limit is None else min(limit, forked)
            lineage = parent
