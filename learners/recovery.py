"""A store that has lost its newest writes, or everything, is told by the learner what its weights contain.

Which happens: a power cut costs a store that syncs once a second about that second, a managed one without a log all of
it. The weights know better. What trained them is in the archive, each part written and synced before its commit, and
where each lineage forked is in the learner's hands, in its checkpoints and in metrics.jsonl. So the store adopts the
lineages it has forgotten and commits again, in order, each step that it has forgotten: no group that the weights
contain can be trained another time. What else it lost is not in the weights and is generated again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.buffers.archive import Archive, branch_to
from asyncrl.buffers.base import Buffer, BufferError
from asyncrl.staleness import Weights

log = logging.getLogger(__name__)

Forks = Mapping[int, tuple[int, int]]
"""lineage -> (parent lineage, version where it forked); the whole path to a lineage at least."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a store had forgotten on the way to `own`. `store`: where it was; lineages and steps: what it was told."""

    own: Weights
    store: Weights
    lineages: tuple[int, ...]
    steps: tuple[Weights, ...]

    def event(self) -> dict[str, int]:
        """For metrics.jsonl."""
        return {
            "lineage": self.own.lineage,
            "version": self.own.version,
            "store_lineage": self.store.lineage,
            "store_version": self.store.version,
            "steps": len(self.steps),
        }

    def __str__(self) -> str:
        told = f"{len(self.steps)} steps" + (f" and {len(self.lineages)} lineages" if self.lineages else "")
        return f"it was at version {self.store.version} of lineage {self.store.lineage}; it was told of {told}"


def is_behind(store: Weights, own: Weights) -> bool:
    """Whether the store, whose newest weights are `store`, has forgotten what it acknowledged to the holder of `own`.

    A version is trained beyond, and a lineage used, only after the store has acknowledged it. Later weights of the same
    lineage, or a later lineage, are another learner's: then the store is not behind, this learner is fenced.

    >>> is_behind(Weights(1, 7), Weights(1, 8)), is_behind(Weights(1, 9), Weights(2, 5))
    (True, True)
    >>> is_behind(Weights(3, 5), Weights(2, 8))
    False
    """
    return store < own


def path_to(own: Weights, forks: Forks) -> dict[int, Weights]:
    """The lineages that `own` comes from, oldest first, and where each forked.

    >>> path_to(Weights(4, 9), {1: (0, 0), 2: (1, 8), 3: (1, 5), 4: (3, 7)})
    {1: Weights(lineage=0, version=0), 3: Weights(lineage=1, version=5), 4: Weights(lineage=3, version=7)}
    """
    path: dict[int, Weights] = {}
    lineage = own.lineage
    while lineage > 0:
        path[lineage] = Weights(*forks[lineage])
        lineage = path[lineage].lineage
    return dict(sorted(path.items()))


def forgotten_steps(store: Weights, known: Forks, own: Weights, forks: Forks) -> list[Weights]:
    """(lineage, step) of each step on the path to `own` that is not on the store's own path, in order: after where the
    two part, which is where a store that adopts the missing lineages goes back to.

    >>> tree = {1: (0, 0), 2: (1, 4)}
    >>> forgotten_steps(Weights(1, 3), {1: (0, 0)}, Weights(2, 5), tree)
    [Weights(lineage=1, version=3), Weights(lineage=2, version=4)]
    >>> forgotten_steps(Weights(1, 9), {1: (0, 0)}, Weights(2, 5), tree)
    [Weights(lineage=2, version=4)]
    """
    theirs, path = _steps(store, known), _steps(own, forks)
    shared = 0
    while shared < min(len(theirs), len(path)) and theirs[shared] == path[shared]:
        shared += 1
    return path[shared:]


def lineages_in(records: Iterable[Mapping[str, Any]]) -> dict[int, tuple[int, int]]:
    """lineage -> where it forked, of every learner that has ever started here: from the events of metrics.jsonl.

    >>> lineages_in([{"event": "start", "lineage": 1, "parent": [0, 0]}, {"step": 1}])
    {1: (0, 0)}
    """
    starts = (record for record in records if record.get("event") == "start")
    return {int(start["lineage"]): (int(start["parent"][0]), int(start["parent"][1])) for start in starts}


def newest_known(forks: Forks, checkpoint: Weights) -> Weights:
    """What the store must know before a learner resumes from `checkpoint`: at least that the newest lineage was there,
    though nothing of it may have survived. Collectors may still serve its weights, whose name must not be given again.

    >>> newest_known({1: (0, 0), 2: (1, 5)}, Weights(1, 5)), newest_known({1: (0, 0), 2: (1, 5)}, Weights(2, 7))
    (Weights(lineage=2, version=5), Weights(lineage=2, version=7))
    """
    newest = max(forks, default=0)
    return max(checkpoint, Weights(newest, forks[newest][1])) if newest else checkpoint


async def recover(buffer: Buffer, archive: Archive, *, forks: Forks, own: Weights) -> Recovered | None:
    """Tell the store what it has forgotten on the way to `own`; None if that is nothing. May be repeated.

    Needs the archive's part of every step that the store has forgotten, and of no other. Raises BufferError that names
    the first one missing, or a lineage that the store knows otherwise, so that it is not this run's past that it lost;
    the store is then as it was.
    """
    stats = await buffer.stats()
    store = Weights(stats.lineage, stats.version)
    interrupted = stats.phase == "rewinding" and store.lineage == own.lineage  # by another outage, in what follows
    if not is_behind(store, own) and not interrupted:
        return None
    path = path_to(own, forks)
    steps = forgotten_steps(store, stats.forks, own, forks)
    trained = [await tickets_of(archive, step) for step in steps]
    await buffer.adopt(path)
    for step, tickets in zip(steps, trained, strict=True):
        await buffer.recommit(step.lineage, step.version, tickets)
    found = Recovered(own, store, tuple(lineage for lineage in path if lineage not in stats.forks), tuple(steps))
    log.warning("the store had lost its newest writes: %s", found)
    return found


async def tickets_of(archive: Archive, step: Weights) -> list[tuple[int, int]]:
    """(ordinal, attempt) of the groups that a step trained. Raises BufferError."""
    try:
        return await asyncio.to_thread(archive.tickets, step)
    except FileNotFoundError as error:
        raise BufferError(
            f"the store has forgotten step {step.version} of lineage {step.lineage}, and what it trained cannot be "
            f"said: {error}; give the store back its data, or start a new run"
        ) from None


def _steps(weights: Weights, forks: Forks) -> list[Weights]:
    """(lineage, step) of each step that made `weights`; the n-th made version n + 1."""
    return [
        Weights(lineage, step) for lineage, first, last in branch_to(weights, forks) for step in range(first, last + 1)
    ]
