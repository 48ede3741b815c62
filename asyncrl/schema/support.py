"""Between which tokens each token was drawn, where that was not all of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Support:
    """The sampling masks of T draws, back to back: draw t has `counts[t]` of `ids`.

    counts int32 [T]; 0: any token of the vocabulary. ids int32 [sum of counts], ascending within a draw: those of a
    draw are all >= 0, the tokens it could have taken, or all < 0, and then ~id are the ones it could not: top-k leaves
    few, and a stop token that comes too early is one of many.

    >>> Support.of([(3, 7), (), (~2,)])
    Support(counts=array([2, 0, 1], dtype=int32), ids=array([ 3,  7, -3], dtype=int32))
    """

    counts: NDArray[np.int32]
    ids: NDArray[np.int32]

    @classmethod
    def of(cls, draws: Sequence[Sequence[int]]) -> Support:
        """From the ids of each draw."""
        counts = np.array([len(draw) for draw in draws], dtype=np.int32)
        return cls(counts, np.array([id for draw in draws for id in draw], dtype=np.int32))

    def take(self, draws: NDArray[np.int64]) -> Support:
        """Those of some draws, in the order in which they are asked for.

        >>> Support.of([(3, 7), (), (~2,)]).take(np.array([2, 0]))
        Support(counts=array([1, 2], dtype=int32), ids=array([-3,  3,  7], dtype=int32))
        """
        counts = self.counts[draws]
        starts = np.cumsum(self.counts)[draws] - counts
        return Support(
            counts, self.ids[np.arange(counts.sum()) + np.repeat(starts - np.cumsum(counts) + counts, counts)]
        )

    @classmethod
    def joined(cls, parts: Sequence[tuple[Support | None, int]]) -> Support | None:
        """Of parts in order, each with its number of draws (None: all of them free); None if all are."""
        if all(support is None for support, _ in parts):
            return None
        free = [cls(np.zeros(draws, np.int32), np.empty(0, np.int32)) for _, draws in parts]
        known = [own if support is None else support for (support, _), own in zip(parts, free, strict=True)]
        return cls(np.concatenate([part.counts for part in known]), np.concatenate([part.ids for part in known]))
