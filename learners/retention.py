"""Which checkpoints are kept. Pure: names and numbers in, names out.

A learner goes on from the newest ones, of which there is always one: the store keeps what a rewind to the oldest of
these would need. Those kept beside them are for evaluations, exports and replays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from asyncrl.staleness import Lineages, Weights


@dataclass(frozen=True, slots=True)
class Kept:
    """newest: what a learner can go on from, newest first. beside: kept for other reasons, newest first."""

    newest: tuple[Weights, ...]
    beside: tuple[Weights, ...] = ()

    def __contains__(self, name: object) -> bool:
        return name in self.newest or name in self.beside


def kept(
    saved: Iterable[Weights],
    *,
    lineages: Lineages,
    current: int,
    keep_last: int,
    keep_best: int = 0,
    keep_every: int | None = None,
    success: Mapping[Weights, float | None] | None = None,
) -> Kept:
    """What of `saved` stays: the newest `keep_last` (at least 1) of the branch that leads to lineage `current`, and
    beside them those of its other versions that are among the `keep_best` with the highest `success`, the newer one of
    equals, or a multiple of `keep_every`.

    Of rewound branches nothing stays: no learner goes on from them, and by their number alone they would push living
    ones out. Those of a newer lineage all stay: its learner has taken over, and decides. A version that was not
    evaluated, or whose success is not a number, is not among the best.

    >>> tree, names = Lineages({1: (0, 0)}), [Weights(1, version) for version in (10, 20, 30, 40)]
    >>> measured = {Weights(1, 20): 0.9, Weights(1, 40): 0.5}
    >>> found = kept(names, lineages=tree, current=1, keep_last=1, keep_best=1, keep_every=30, success=measured)
    >>> [name.version for name in found.newest], [name.version for name in found.beside]
    ([40], [30, 20])
    """
    saved = set(saved)
    branch = sorted((name for name in saved if lineages.is_ancestor(name, current)), reverse=True)
    known = {name: value for name, value in (success or {}).items() if value is not None and math.isfinite(value)}
    ranked = sorted((name for name in branch if name in known), key=lambda name: (known[name], name), reverse=True)
    wanted = set(ranked[:keep_best])
    if keep_every is not None:
        wanted.update(name for name in branch if name.version % keep_every == 0)
    newest = tuple(branch[:keep_last])
    others = sorted({name for name in saved if name.lineage > current}, reverse=True)
    return Kept(newest, (*others, *(name for name in branch if name in wanted and name not in newest)))
