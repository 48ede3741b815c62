"""The effective sample size of whole answers, from the logarithms of their importance weights.

An answer's weight is W, the product of its tokens' ratios pi / mu: over 32,000 tokens its logarithm may be in the
thousands, and W itself is neither a float nor needed. It is neither cut nor masked here: over weights that a cap has
been at, or over single tokens, the number looks well while a few answers carry the whole gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray


class Weighed(NamedTuple):
    """n weights W_i, of which the largest is exp(top), as sums that those of other answers can be put together with.

    first: sum of W_i / exp(top). second: sum of (W_i / exp(top))^2. Both lie between 1 and n.
    """

    n: float
    top: float
    first: float
    second: float

    @classmethod
    def of(cls, log_weights: NDArray[np.float64]) -> Self:
        """log_weights [n], nats, finite; none are possible."""
        if not len(log_weights):
            return cls(0.0, 0.0, 0.0, 0.0)
        top = float(log_weights.max())
        shrunk = np.exp(log_weights - top)
        return cls(float(len(shrunk)), top, float(shrunk.sum()), float((shrunk**2).sum()))

    @classmethod
    def together(cls, parts: Iterable[Weighed]) -> Self:
        """All answers of disjoint parts, such as the ranks' shares or the updates of a step."""
        some = [part for part in parts if part.n]
        if not some:
            return cls(0.0, 0.0, 0.0, 0.0)
        top = max(part.top for part in some)
        shrink = [float(np.exp(part.top - top)) for part in some]
        return cls(
            sum(part.n for part in some),
            top,
            sum(part.first * by for part, by in zip(some, shrink, strict=True)),
            sum(part.second * by**2 for part, by in zip(some, shrink, strict=True)),
        )

    @property
    def ess(self) -> float | None:
        """(sum W)^2 / (n sum W^2), Kish's: 1 if all weigh the same, 1/n if one carries all. None without any.

        >>> Weighed.of(np.log([3.0, 3.0])).ess, Weighed.of(np.array([9000.0, 0.0, 0.0, 0.0])).ess
        (1.0, 0.25)
        """
        return self.first**2 / (self.n * self.second) if self.n else None


def answer_log_ratios(
    logprobs: NDArray[np.float32],
    behaviour: NDArray[np.float32],
    measured: NDArray[np.bool_],
    answers: NDArray[np.int64],
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """[answers] log W of each answer over its `measured` tokens, in float64, and which answers have one.

    logprobs, behaviour, measured [N]: of packed tokens; answers [N]: whose each is, ascending, from 0.

    >>> of = np.float32([0, -1, 0, -2]), np.float32([0, -3, 0, -2])
    >>> answer_log_ratios(*of, np.array([False, True, False, False]), np.array([0, 0, 1, 1]))
    (array([2., 0.]), array([ True, False]))
    """
    count = int(answers[-1]) + 1 if len(answers) else 0
    log_ratio = logprobs[measured].astype(np.float64) - behaviour[measured]
    sums = np.bincount(answers[measured], weights=log_ratio, minlength=count)
    return sums.astype(np.float64), np.bincount(answers[measured], minlength=count) > 0


def slots(own: Weighed, *, rank: int, size: int) -> list[float]:
    """`own` in the place of this rank, zeros in those of the others: summed over ranks, it is what each of them has."""
    empty = [0.0] * len(Weighed._fields)
    return [value for place in range(size) for value in (own if place == rank else empty)]


def from_slots(values: Sequence[float]) -> Weighed:
    """All ranks' answers out of the sum of their `slots`: from the same numbers in the same order, so equal to the bit
    on every rank.

    >>> parts = [Weighed.of(np.array([0.0])), Weighed.of(np.array([0.0, -800.0]))]
    >>> total = [sum(both) for both in zip(*(slots(part, rank=r, size=2) for r, part in enumerate(parts)))]
    >>> round(from_slots(total).ess, 3)
    0.667
    """
    width = len(Weighed._fields)
    return Weighed.together(Weighed(*values[at : at + width]) for at in range(0, len(values), width))
