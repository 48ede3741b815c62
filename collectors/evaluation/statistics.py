"""Numbers over held-out prompts, and how far they can be trusted: pure functions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 4000
"""Bootstrap resamples: the ends of a 95 % interval then move by less than a twentieth of its width between seeds."""

LEVEL = 0.95

_CHUNK = 1 << 22  # entries of the resampled matrix held at once


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts with its interval. All None where there is no prompt."""

    value: float | None
    low: float | None
    high: float | None
    prompts: int


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate, from n samples of which c pass, of the probability that at least one of k samples passes:
    1 - C(n - c, k) / C(n, k) (Chen et al., "Evaluating large language models trained on code", 2021, eq. 1), as the
    product of 1 - k / i over i in n - c + 1 ... n, which neither overflows nor cancels.

    Raises ValueError unless 0 <= c <= n and 1 <= k <= n: with fewer than k samples there is no unbiased estimate.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {n} samples, {c} of them passing, is not defined")
    if n - c < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def mean_with_interval(per_prompt: ArrayLike, *, seed: int) -> Estimate:
    """The mean of one value per prompt, with the percentile bootstrap's 95 % interval over prompts (Efron, 1979).

    Prompts are resampled, not samples: answers to one prompt are no independent evidence about other prompts. For the
    interval of a difference give the differences, prompt by prompt. Where all values are equal the width is 0: a
    resample cannot contain what was never seen.
    """
    values: NDArray[np.float64] = np.asarray(per_prompt, dtype=np.float64)
    if not len(values):
        return Estimate(None, None, None, 0)
    generator = np.random.default_rng(seed)
    rows = max(1, _CHUNK // len(values))
    means = np.concatenate(
        [
            values[generator.integers(len(values), size=(min(rows, RESAMPLES - start), len(values)))].mean(axis=1)
            for start in range(0, RESAMPLES, rows)
        ]
    )
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(values.mean()), float(low), float(high), len(values))
