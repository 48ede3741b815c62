"""Which of several tasks a prompt comes from: pure functions of a number, as the order of rows is (`order.py`)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

LONGEST_PERIOD = 10_000
"""Ordinals after which shares repeat. Weights such as 2 : 1 repeat sooner, and exactly; of weights that have no common
measure, such as 0.317 : 0.771, a share is off by less than one in so many."""


class Shares:
    """Deals ordinals to tasks by `weights`, as evenly as whole ordinals allow: of the first n ordinals, whatever n, a
    task gets its share of n to within one or two. So each batch that is trained in order has the mix that the recipe
    asks for, and not only the average of them.

    >>> shares = Shares([2.0, 1.0])
    >>> [shares.deal(ordinal) for ordinal in range(6)]
    [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 3)]
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """weights: above 0, one for each task."""
        counts = _counts(weights)
        self._period = sum(counts)
        self._dealt = _spread(counts)
        self._places: list[list[int]] = [[] for _ in counts]  # of each task, ascending
        for place, task in enumerate(self._dealt):
            self._places[task].append(place)

    def deal(self, ordinal: int) -> tuple[int, int]:
        """The task of this ordinal, and how many lower ordinals are the same task's."""
        period, place = divmod(ordinal, self._period)
        task = self._dealt[place]
        mine = self._places[task]
        return task, period * len(mine) + bisect_right(mine, place) - 1


def evenly(index: int, sizes: Sequence[int]) -> tuple[int, int]:
    """Where the item `index` of several lists of these sizes is, taken in turns, each for as long as it lasts: which
    list, and its place there. Raises IndexError beyond the last.

    >>> [evenly(index, [3, 1, 2]) for index in range(6)]
    [(0, 0), (1, 0), (2, 0), (0, 1), (2, 1), (0, 2)]
    """
    rounds, left = 0, index
    while left >= 0 and (alive := [n for n, size in enumerate(sizes) if size > rounds]):
        ahead = min(sizes[n] for n in alive) - rounds  # rounds in which all of these take part
        if left < ahead * len(alive):
            done, turn = divmod(left, len(alive))
            return alive[turn], rounds + done
        rounds, left = rounds + ahead, left - ahead * len(alive)
    raise IndexError(f"item {index} of {sum(sizes)}")


def _counts(weights: Sequence[float]) -> list[int]:
    """Ordinals of each task in a period, at least one."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    common = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * common) for weight in exact]
    whole = [n // gcd(*whole) for n in whole]
    total = sum(whole)
    if total <= LONGEST_PERIOD:
        return whole
    return [max(1, round(Fraction(n * LONGEST_PERIOD, total))) for n in whole]


def _spread(counts: Sequence[int]) -> list[int]:
    """The tasks of a period, in order. Each place goes to the task that is farthest behind its share, the first of
    equals. That one has not had all of its places yet: what all are behind adds up to one place."""
    period = sum(counts)
    had = [0] * len(counts)
    dealt = []
    for place in range(1, period + 1):
        task = max(range(len(counts)), key=lambda n: counts[n] * place - had[n] * period)
        had[task] += 1
        dealt.append(task)
    return dealt
