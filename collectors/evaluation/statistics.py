"""Numbers over held-out prompts, and how far they can be trusted: pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 4000
"""Bootstrap resamples: the ends of a 95 % interval then move by less than a twentieth of its width between seeds."""

LEVEL = 0.95

FLIPS = 10_000
"""Random flips of a permutation test: a p of 0.05 is then known to within 0.004."""

FEWEST_PROMPTS = 6
"""Fewest prompts of which a permutation test can say anything: five that all differ the same way have a p of 2 / 2^5,
which is above 0.05."""

_ROUNDING = 1e-18
"""A variance below it is that of equal numbers, rounded."""

_Z = NormalDist().inv_cdf((1 + LEVEL) / 2)

_EXACT = 12  # differences whose 2^n flips are all tried: fewer than FLIPS
_CHUNK = 1 << 22  # entries of the resampled matrix held at once


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number over prompts with its interval. All None where there is no prompt; the ends alone where they cannot be
    said."""

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


def majority(readings: Sequence[str], passes: Sequence[bool]) -> float:
    """Whether the most common reading of some answers passes (self-consistency, arXiv 2203.11171): the share of the
    answers with that reading that do, which verifiers that look at more than the reading may tell apart. Where several
    are the most common ones, their mean: what breaking the tie by lot is worth.

    >>> majority(["12", "12", "7"], [True, True, False]), majority(["12", "7"], [True, False])
    (1.0, 0.5)
    """
    votes = Counter(readings)
    most = max(votes.values())
    passing = Counter(reading for reading, passed in zip(readings, passes, strict=True) if passed)
    first = [reading for reading, count in votes.items() if count == most]
    return sum(passing[reading] for reading in first) / (most * len(first))


def mean_with_interval(per_prompt: ArrayLike, *, seed: int) -> Estimate:
    """The mean of one value per prompt, with the percentile bootstrap's 95 % interval over prompts (Efron, 1979): for
    what has no bounds, such as tokens. Where all values are equal its width is 0: a resample cannot contain what was
    never seen.

    Prompts are resampled, not samples: answers to one prompt are no independent evidence about other prompts.
    """
    values: NDArray[np.float64] = np.asarray(per_prompt, dtype=np.float64)
    if not len(values):
        return Estimate(None, None, None, 0)
    means = np.concatenate([values[rows].mean(axis=1) for rows in _resamples(len(values), seed)])
    return _estimate(float(values.mean()), means, len(values))


def share_with_interval(pairs: Sequence[tuple[float, float]]) -> Estimate:
    """Of one pair (how many, out of how many) per prompt, the share of all together, with a 95 % interval over prompts
    that holds near 0 and 1 too, where a bootstrap's has no width and covers nothing.

    It is the score interval (Wilson, Journal of the American Statistical Association 22, 1927) of as many independent
    draws as the scatter between prompts is worth (Korn and Graubard, Survey Methodology 24, 1998): R (1 - R) / v, with
    v the variance of a ratio of sums over clusters, less for a v that few prompts tell. Where prompts do not differ, a
    draw a prompt: all answers to one may be one piece of evidence.

    >>> share_with_interval([(0, 4)] * 32)
    Estimate(value=0.0, low=0.0, high=0.10717919825507058, prompts=32)
    """
    some, of = np.asarray(pairs, dtype=np.float64).reshape(-1, 2).T
    if not of.sum():
        return Estimate(None, None, None, len(of))
    share = min(1.0, max(0.0, float(some.sum() / of.sum())))  # a sum of rounded shares may lie beyond
    low, high = _score(share, _draws(some, of, share))
    return Estimate(share, low, high, len(of))


def rate_with_interval(per_prompt: ArrayLike, *, bounds: tuple[float, float] = (0.0, 1.0)) -> Estimate:
    """The mean of one value per prompt that lies between two bounds, with the interval of `share_with_interval`."""
    values: NDArray[np.float64] = np.asarray(per_prompt, dtype=np.float64)
    if not len(values):
        return Estimate(None, None, None, 0)
    lowest, width = bounds[0], bounds[1] - bounds[0]
    found = share_with_interval([((value - lowest) / width, 1.0) for value in values])
    low, high = (None if end is None else lowest + width * end for end in (found.low, found.high))
    return Estimate(float(values.mean()), low, high, len(values))


def rate_difference(differences: ArrayLike, *, width: float = 1.0) -> Estimate:
    """The mean of the differences, prompt by prompt, of two such rates; width: between their bounds.

    Gains and losses are two rates over the same prompts, each with its score interval between 0 and the largest change
    seen (the width, where none was), and so is their difference (MOVER: Zou and Donner, Statistics in Medicine 27,
    2008; Newcombe, Statistics in Medicine 17, 1998, method 10, for pairs). That no prompt changed does not say that
    none would.

    >>> rate_difference([0.0] * 32)
    Estimate(value=0.0, low=-0.10717919825507058, high=0.10717919825507058, prompts=32)
    """
    values: NDArray[np.float64] = np.asarray(differences, dtype=np.float64)
    if not len(values):
        return Estimate(None, None, None, 0)
    scale = float(abs(values).max()) or width
    up, down = np.maximum(values, 0.0) / scale, np.maximum(-values, 0.0) / scale
    (gain, gain_low, gain_high), (loss, loss_low, loss_high) = map(_bounded, (up, down))
    scatter = float(up.std() * down.std())
    together = float(np.mean((up - gain) * (down - loss))) / scatter if scatter > 0 else 0.0

    def reach(a: float, b: float) -> float:
        return scale * sqrt(max(0.0, a * a + b * b - 2 * together * a * b))

    value = float(values.mean())
    low = value - reach(gain - gain_low, loss_high - loss)
    return Estimate(value, low, value + reach(gain_high - gain, loss - loss_low), len(values))


def ratio_with_interval(pairs: Sequence[tuple[float, float]], *, seed: int) -> Estimate:
    """Of one pair per prompt, the sum of all first ones / that of all second ones, with the interval of
    `mean_with_interval`. No value where the second ones are all 0, no ends where those of a resample are.

    >>> ratio_with_interval([(8, 1), (4, 2)], seed=0).value
    4.0
    """
    over, under = np.asarray(pairs, dtype=np.float64).reshape(-1, 2).T
    if not under.sum():
        return Estimate(None, None, None, len(under))
    return _estimate(float(over.sum() / under.sum()), _ratios(over, under, seed), len(under))


def ratio_difference(
    ours: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]], *, seed: int
) -> Estimate:
    """The difference of two such ratios over the same prompts, which are resampled together."""
    (a, b), (c, d) = (np.asarray(side, dtype=np.float64).reshape(-1, 2).T for side in (ours, theirs))
    if not (b.sum() and d.sum()):
        return Estimate(None, None, None, len(b))
    with np.errstate(invalid="ignore"):  # nothing below on both sides: no ends, below
        difference = _ratios(a, b, seed) - _ratios(c, d, seed)
    return _estimate(float(a.sum() / b.sum() - c.sum() / d.sum()), difference, len(b))


def sign_flip_p(differences: ArrayLike, *, seed: int) -> float | None:
    """Two-sided p of paired differences, one a prompt: were the two sides the same, each difference would be as likely
    with the other sign, and the mean as far from 0 in so many of all flips (Fisher's randomisation test). Of single
    right-or-wrong answers it is McNemar's exact test. None without a prompt.

    All flips are tried where they are few, else so many at random that p is at least 1 / (1 + FLIPS).

    >>> sign_flip_p([1, 1, 1, 1, 1, 0], seed=0), sign_flip_p([0.0, 0.0], seed=0)
    (0.0625, 1.0)
    """
    values: NDArray[np.float64] = np.asarray(differences, dtype=np.float64)
    if not len(values):
        return None
    values = values[values != 0]  # neither sign of these moves the mean
    seen = abs(values.sum()) * (1 - 1e-9)  # sums of the same numbers in another order are the same number
    if len(values) <= _EXACT:
        flips = np.arange(1 << len(values))[:, None] >> np.arange(len(values)) & 1
        return float((abs((1 - 2 * flips) @ values) >= seen).mean())
    generator = np.random.default_rng(seed)
    rows = max(1, _CHUNK // len(values))
    further = 0
    for start in range(0, FLIPS, rows):
        signs = 1 - 2 * generator.integers(2, size=(min(rows, FLIPS - start), len(values)), dtype=np.int8)
        further += int((abs(signs @ values) >= seen).sum())
    return (1 + further) / (1 + FLIPS)


def _bounded(shares: NDArray[np.float64]) -> tuple[float, float, float]:
    """The mean of one share per prompt, and the ends of its interval."""
    share = min(1.0, float(shares.mean()))
    return share, *_score(share, _draws(shares, np.ones_like(shares), share))


def _draws(some: NDArray[np.float64], of: NDArray[np.float64], share: float) -> float:
    """How many independent draws of right or wrong tell as much as these prompts do."""
    prompts = len(of)
    if prompts < 2:
        return 1.0
    variance = prompts / (prompts - 1) * float(np.sum(np.square(some - share * of))) / float(of.sum()) ** 2
    if variance < _ROUNDING:
        return float(prompts)
    return share * (1 - share) / variance * (_Z / _student(prompts - 1)) ** 2


def _student(freedom: int) -> float:
    """What of Student's distribution has the level between -t and t, by Fisher's expansion of it in 1 / freedom
    (Abramowitz and Stegun, 26.7.5): to a hundredth from 4 on, too small below."""
    z = _Z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(float(term / freedom**power) for power, term in enumerate(terms, 1))


def _score(share: float, draws: float) -> tuple[float, float]:
    """Wilson's interval: the rates that are less than _Z of their own standard errors from the share."""
    middle = share + _Z**2 / (2 * draws)
    half = _Z * sqrt(share * (1 - share) / draws + _Z**2 / (4 * draws**2))
    whole = 1 + _Z**2 / draws
    # At the ends rounding would leave a little of what is exactly 0 or 1.
    low = 0.0 if share == 0 else max(0.0, (middle - half) / whole)
    return low, 1.0 if share == 1 else min(1.0, (middle + half) / whole)


def _resamples(prompts: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """RESAMPLES draws of so many prompts, as indices, some rows at a time. The same ones for the same seed and number,
    which is what pairs two sides."""
    generator = np.random.default_rng(seed)
    rows = max(1, _CHUNK // prompts)
    for start in range(0, RESAMPLES, rows):
        yield generator.integers(prompts, size=(min(rows, RESAMPLES - start), prompts))


def _ratios(over: NDArray[np.float64], under: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.concatenate(
            [over[rows].sum(axis=1) / under[rows].sum(axis=1) for rows in _resamples(len(over), seed)]
        )


def _estimate(value: float, resampled: NDArray[np.float64], prompts: int) -> Estimate:
    if not np.isfinite(resampled).all():
        return Estimate(value, None, None, prompts)
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, float(low), float(high), prompts)
