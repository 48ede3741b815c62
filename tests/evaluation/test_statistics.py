"""pass@k is unbiased, and intervals cover what they should."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.collectors.evaluation.statistics import LEVEL, mean_with_interval, pass_at_k


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_that_contain_a_passing_one(n: int) -> None:
    for c in range(n + 1):
        samples = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            choices = list(combinations(samples, k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)


@given(p=st.floats(0, 1), n=st.integers(1, 40), data=st.data())
def test_pass_at_k_is_unbiased(p: float, n: int, data: st.DataObject) -> None:
    """Its mean over all outcomes of n samples that pass with probability p is 1 - (1 - p)^k."""
    k = data.draw(st.integers(1, n))
    weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    mean = sum(weight * pass_at_k(n, c, k) for c, weight in enumerate(weights))
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-9)


def test_the_plain_estimate_from_the_mean_is_biased() -> None:
    """The control: 1 - (1 - c/n)^k, which is often used instead, is not what the test above accepts."""
    n, k, p = 4, 4, 0.3
    weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    plain = sum(weight * (1 - (1 - c / n) ** k) for c, weight in enumerate(weights))
    assert abs(plain - (1 - (1 - p) ** k)) > 0.05


def test_pass_at_k_neither_overflows_nor_cancels() -> None:
    assert pass_at_k(10**6, 1, 10) == pytest.approx(1e-5, rel=1e-6)
    assert pass_at_k(10**6, 10**6 - 10, 10) == pytest.approx(1.0)


@pytest.mark.parametrize(("n", "c", "k"), [(2, 3, 1), (2, -1, 1), (2, 1, 3), (2, 1, 0)])
def test_pass_at_k_refuses_what_has_no_unbiased_estimate(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(n, c, k)


@given(values=st.lists(st.floats(-1, 1), min_size=1, max_size=20), seed=st.integers(0, 9))
def test_an_interval_lies_around_its_mean_and_within_the_values(values: list[float], seed: int) -> None:
    found = mean_with_interval(values, seed=seed)
    assert found.low is not None
    assert found.high is not None
    assert found.value == pytest.approx(np.mean(values))
    assert min(values) - 1e-9 <= found.low <= found.high <= max(values) + 1e-9
    assert found.low - 1e-9 <= np.mean(values) <= found.high + 1e-9
    assert found == mean_with_interval(values, seed=seed)
    assert found.prompts == len(values)


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    generator = np.random.default_rng(0)
    truth, times, covered = 0.3, 300, 0
    for _ in range(times):
        found = mean_with_interval(generator.random(80) < truth, seed=0)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= truth <= found.high
    assert covered / times == pytest.approx(LEVEL, abs=0.05)


def test_no_prompt_gives_no_number() -> None:
    found = mean_with_interval([], seed=0)
    assert (found.value, found.low, found.high, found.prompts) == (None, None, None, 0)
