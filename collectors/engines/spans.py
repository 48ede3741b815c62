"""Which weights sampled which tokens: the bookkeeping that engines stamp their completions with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from asyncrl.collectors.engines.base import Span
from asyncrl.staleness import Weights


@dataclass(frozen=True, slots=True)
class Served:
    """What an engine samples from: the name of the weights and the checksum computed over what is really served."""

    weights: Weights
    checksum: str


def label_of(served: Served) -> str:
    """The weight version that a server stamps its tokens with. It says all that a span needs: no table has to be kept
    for as long as a request may run.

    >>> label_of(Served(Weights(1, 7), "9c0f"))
    '1/7/9c0f'
    """
    return f"{served.weights.lineage}/{served.weights.version}/{served.checksum}"


def served_of(label: str) -> Served:
    """`label_of` backwards. Raises ValueError for a label that is none."""
    lineage, version, checksum = label.split("/")
    return Served(Weights(int(lineage), int(version)), checksum)


@dataclass(slots=True)
class Stretches:
    """The version stretches of one completion while it grows.

    >>> one, two = Served(Weights(1, 4), "aa"), Served(Weights(1, 5), "bb")
    >>> stretches = Stretches()
    >>> stretches.mark(0, one)
    >>> stretches.mark(3, two)
    >>> [(span.weights.version, span.start, span.end) for span in stretches.spans(5)]
    [(4, 0, 3), (5, 3, 5)]
    """

    _starts: list[tuple[int, Served]] = field(default_factory=list)

    def mark(self, position: int, served: Served) -> None:
        """Tokens from `position` on are sampled from `served`. Positions never decrease."""
        if self._starts and self._starts[-1][1] is served:
            return  # for nearly every token
        while self._starts and self._starts[-1][0] >= position:
            self._starts.pop()  # weights that came and went between two tokens sampled nothing
        if not self._starts or self._starts[-1][1] != served:
            self._starts.append((position, served))

    def spans(self, total: int) -> tuple[Span, ...]:
        """The spans of the first `total` tokens, in order, without gaps; none is empty. In any thread: what `mark` does
        meanwhile is about later tokens."""
        starts = list(self._starts)
        ends = [*(start for start, _ in starts[1:]), total]
        return tuple(
            Span(weights=served.weights, start=start, end=min(end, total), checksum=served.checksum)
            for (start, served), end in zip(starts, ends, strict=False)  # nothing sampled: no start, one end
            if start < min(end, total)
        )


def token_versions(spans: Sequence[Span]) -> NDArray[np.int32]:
    """One version per token, int32 [T], from spans that cover tokens 0 .. T."""
    versions = np.empty(spans[-1].end if spans else 0, dtype=np.int32)
    for span in spans:
        versions[span.start : span.end] = span.weights.version
    return versions
