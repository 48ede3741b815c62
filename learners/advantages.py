"""How much better than its group a completion was. Pure NumPy, float64: rewards that differ by less than float32 can
tell must not turn into noise divided by a tiny spread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["group-mean-std", "group-mean", "leave-one-out"]

# Added to the spread, as in the GRPO implementation of TRL: groups that hardly vary are not blown up to unit variance.
EPSILON = 1e-4


@dataclass(frozen=True, slots=True)
class Advantages:
    """values: float64 [rows], 0 for unscored rows. The counts are of groups: `alone` has one scored member, `unscored`
    none, and `equal` several with the same reward; none of the three teaches anything."""

    values: NDArray[np.float64]
    alone: int
    unscored: int
    equal: int


def advantages(rewards: NDArray[np.float64], groups: NDArray[np.int64], kind: Kind) -> Advantages:
    """Advantage of each row against the scored members of its group. rewards [rows], NaN = unscored; groups [rows].

    With r_1..r_n the scored rewards of a group, m their mean and s their standard deviation:

    - group-mean-std: (r_i - m) / (s + 1e-4), s over n - 1 (GRPO, arXiv 2402.03300; the n - 1 is TRL's)
    - group-mean: r_i - m (Dr. GRPO, arXiv 2503.20783: no division, which favours very easy and very hard prompts)
    - leave-one-out: r_i - mean of the others = (r_i - m) n / (n - 1) (RLOO, arXiv 2402.14740: unbiased)

    Equal rewards give exactly 0, and so does a group with a single scored member.

    >>> advantages(np.array([1.0, 0.0, np.nan, 0.5]), np.array([0, 0, 0, 1]), "leave-one-out").values.tolist()
    [1.0, -1.0, 0.0, 0.0]
    """
    values = np.zeros(len(rewards), dtype=np.float64)
    scored = ~np.isnan(rewards)
    alone = unscored = equal = 0
    for group in np.unique(groups):
        members = np.flatnonzero((groups == group) & scored)
        r = rewards[members].astype(np.float64)
        n = len(r)
        if n < 2:
            alone += n == 1
            unscored += n == 0
        elif r.min() == r.max():  # tested, since the mean of equal numbers may be off by a rounding
            equal += 1
        elif kind == "group-mean-std":
            values[members] = (r - r.mean()) / (r.std(ddof=1) + EPSILON)
        elif kind == "group-mean":
            values[members] = r - r.mean()
        else:
            values[members] = (r - r.mean()) * n / (n - 1)
    return Advantages(values, alone=alone, unscored=unscored, equal=equal)
