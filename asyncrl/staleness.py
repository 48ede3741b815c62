"""The only definition of age, admission, due and order. Pure functions; no I/O, no clock.

Symbols, as in the design and the buffer's contract:

    k   max_trajectory_age: a hard bound, in versions
    B   groups_per_step
    V   version the next step starts from
    s   version a collector serves
    lo  of a ticket: issued -> the version it was issued for; held or leased -> its oldest trainable token's version
        (under `mask` its newest one: older tokens are left out when they are trained)
    r   uses a ticket still owes: how often it is to be trained
    due lo + k: the last step that may train the ticket; the i-th of r uses is due r - i steps earlier
    F   fresh_per_step: groups of a batch that no step has trained before, at least; 0 = no such rule

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


def use_dues(lo: int, max_age: int, uses: int) -> range:
    """When each of a ticket's remaining uses is due, the first one first: a step trains a ticket once at most, so that
    r uses need r steps, of which `due` is the last.

    >>> list(use_dues(4, max_age=2, uses=2))
    [5, 6]
    """
    last = due(lo, max_age)
    return range(last - uses + 1, last + 1)


def promised(lo: int, max_age: int, uses: int, *, used: bool, fresh_per_step: int) -> range:
    """The dues that the due test guards. Where each batch has a share of fresh groups, a ticket is promised one step in
    its window: further uses take what places are left, and are given up where there is none.

    >>> list(promised(4, 2, 2, used=False, fresh_per_step=0)), list(promised(4, 2, 2, used=False, fresh_per_step=1))
    ([5, 6], [6])
    """
    dues = use_dues(lo, max_age, uses)
    if not fresh_per_step:
        return dues
    return dues[:0] if used else dues[-1:]


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

    owed: due step -> uses of live tickets with that due. One due before `first_step` is already lost and fails it.

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
    """A live ticket as the choice of a batch sees it. `lo` is its promise while issued, its oldest token once held;
    `uses` how often it is still to be trained, `used` whether it was before."""

    ordinal: int
    held: bool
    lo: int
    uses: int = 1
    used: bool = False


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
    fresh_per_step: int = 0,
    returned: int | None = None,
) -> Choice:
    """Which held tickets step `version` trains. Contract, section 4.

    live: issued and held tickets by ascending ordinal. `lookahead` (1 to 2) x B of the oldest are in sight, and any
    held one that is due now. `guard_dues` (the policy `wait`): the batch stands only if, without it, all else can be
    trained in time; else the ready tickets with the earliest due are tried, lookahead ignored; else the learner waits,
    for those in sight.
    `more_to_come`: whether a further ticket can be issued or finished; if not, a short batch is the last one.
    fresh_per_step: of B groups at least so many were never trained before; a short batch has the same share of them,
    rounded up. The others come first, as far as they may, since they are what is lost else; they are always ready, so
    that the lookahead does not count them.
    A lookahead of 1 is the strict order: none of the B oldest tickets is passed, whatever else is ready, so that which
    tickets a step trains does not depend on how fast they come. returned: the ticket that a collector which serves V
    would be issued again; it counts among them. One that cannot be issued before this step is made is not waited for.

    >>> held = [Candidate(n, held=True, lo=0) for n in range(3)]
    >>> choose_batch(held, version=0, max_age=0, groups_per_step=2, lookahead=1.5, guard_dues=False, more_to_come=True)
    Choice(batch=(0, 1), waiting_for=())
    >>> late = [Candidate(0, held=False, lo=0), Candidate(1, held=True, lo=0), Candidate(2, held=True, lo=0)]
    >>> choose_batch(late, version=0, max_age=1, groups_per_step=2, lookahead=1, guard_dues=True, more_to_come=True)
    Choice(batch=(), waiting_for=(0,))
    """
    B, F = groups_per_step, fresh_per_step
    ready = [c for c in live if c.held and in_window(c.lo, version=version, max_age=max_age)]
    oldest = _oldest(live, max(B, int(lookahead * B)), F)
    late = tuple(c.ordinal for c in oldest if not c.held)
    if lookahead == 1 and returned is not None and oldest and returned < oldest[-1].ordinal:
        late = (returned, *late)

    def first_due(c: Candidate) -> int:
        return use_dues(c.lo, max_age, c.uses)[0]

    def due_now(c: Candidate) -> bool:
        return first_due(c) <= version

    in_sight = {c.ordinal for c in oldest}

    def order(c: Candidate) -> tuple[bool, int, int]:
        if F and c.used:
            return (False, first_due(c), c.ordinal)
        return (bool(F), due(c.lo, max_age) > version if F else not due_now(c), c.ordinal)

    first = _batch_of(sorted((c for c in ready if c.ordinal in in_sight or due_now(c)), key=order), B, B - F)
    if len(first) < B and not more_to_come and (len(ready) <= B or F):
        fresh = sum(not c.used for c in ready)
        rest = _batch_of(ready, B, min(B - F, fresh * (B - F) // F)) if F else ready
        return Choice(batch=tuple(c.ordinal for c in rest))
    if lookahead == 1 and late:
        return Choice(waiting_for=late)

    def stands(batch: Sequence[Candidate]) -> bool:
        return len(batch) == B and (not guard_dues or _dues_hold(live, batch, version, max_age, B, F))

    if stands(first):
        return Choice(batch=tuple(c.ordinal for c in first))
    if guard_dues:
        soonest = sorted(ready, key=lambda c: (c.used, c.lo, c.ordinal) if F else (False, first_due(c), c.ordinal))
        earliest = _batch_of(soonest, B, B - F)
        if stands(earliest):
            return Choice(batch=tuple(c.ordinal for c in earliest))
    return Choice(waiting_for=late)


def _oldest(live: Sequence[Candidate], count: int, fresh_per_step: int) -> list[Candidate]:
    """The oldest tickets, up to the `count`-th; with a share of fresh ones only those count."""
    found = []
    for c in live:
        if not count:
            break
        found.append(c)
        count -= not (fresh_per_step and c.used)
    return found


def _batch_of(candidates: Iterable[Candidate], size: int, most_used: int) -> list[Candidate]:
    """The first `size` of them, without those that were trained before beyond `most_used`."""
    batch: list[Candidate] = []
    for c in candidates:
        if len(batch) < size and (not c.used or most_used > 0):
            batch.append(c)
            most_used -= c.used
    return batch


def _dues_hold(
    live: Iterable[Candidate], batch: Iterable[Candidate], version: int, max_age: int, B: int, fresh_per_step: int
) -> bool:
    taken = {c.ordinal for c in batch}
    owed: dict[int, int] = {}
    for c in live:
        left = promised(c.lo, max_age, c.uses, used=c.used, fresh_per_step=fresh_per_step)
        for step in left[1:] if c.ordinal in taken else left:  # a batch trains each of its tickets once
            owed[step] = owed.get(step, 0) + 1
    return due_test(owed, first_step=version + 1, groups_per_step=B)


def uses_kept(
    used: Sequence[Candidate], *, version: int, max_age: int, again_per_step: int, last_step: int
) -> dict[int, int]:
    """Ordinal -> how many of the uses that it owes a ticket keeps, where a step trains at most `again_per_step` groups
    that were trained before. used: those groups, the ones that keep their uses rather first. last_step: of the run.

    >>> owing = [Candidate(n, held=True, lo=3, uses=1, used=True) for n in range(3)]
    >>> uses_kept(owing, version=4, max_age=1, again_per_step=2, last_step=9)
    {0: 1, 1: 1, 2: 0}
    """
    owed: dict[int, int] = {}
    kept = {}
    for c in used:
        last = min(due(c.lo, max_age), last_step)
        for keep in range(c.uses, -1, -1):
            planned = dict(owed)
            for step in range(last - keep + 1, last + 1):
                planned[step] = planned.get(step, 0) + 1
            if due_test(planned, first_step=version, groups_per_step=again_per_step):
                owed, kept[c.ordinal] = planned, keep
                break
    return kept


ENDLESS = 2**53
"""More versions than any run has; exact in a double, which is what scripts on the server count with."""


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
        limit = self.last_of(name.lineage, current)
        return limit is not None and name.version <= limit

    def last_of(self, lineage: int, current: int) -> int | None:
        """The last version of `lineage` on the path from the current one: where the path leaves it, ENDLESS for the
        current lineage itself; None if it is not on the path.

        >>> Lineages({1: (0, 0), 2: (1, 5)}).last_of(1, current=2)
        5
        """
        limit = ENDLESS
        while current != lineage:
            if current not in self.forks:
                return None
            current, forked = self.forks[current]
            limit = min(limit, forked)
        return limit
