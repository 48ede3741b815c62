"""pass@k is unbiased, and intervals cover what they should."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.collectors.evaluation.statistics import (
    FEWEST_PROMPTS,
    LEVEL,
    majority,
    mean_with_interval,
    pass_at_k,
    ratio_difference,
    ratio_with_interval,
    sign_flip_p,
)


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


@pytest.mark.parametrize(("better", "worse"), [(1, 0), (5, 0), (6, 0), (8, 2), (4, 4), (20, 8), (30, 12)])
def test_of_single_answers_the_permutation_test_is_mcnemars(better: int, worse: int) -> None:
    """Exact: twice the tail of a fair coin thrown once for each prompt that changed."""
    n = better + worse
    tail = sum(math.comb(n, k) for k in range(max(better, worse), n + 1)) / 2**n
    differences = [1.0] * better + [-1.0] * worse + [0.0] * 9
    assert sign_flip_p(differences, seed=0) == pytest.approx(min(1.0, 2 * tail), abs=0.015)


@given(values=st.lists(st.floats(-1, 1), min_size=1, max_size=30))
def test_a_p_is_a_probability_and_does_not_know_which_side_is_which(values: list[float]) -> None:
    found = sign_flip_p(values, seed=0)
    assert found is not None
    assert 0 < found <= 1
    assert sign_flip_p([-value for value in values], seed=0) == found


def test_equal_models_are_told_apart_no_more_often_than_is_said() -> None:
    generator = np.random.default_rng(1)
    found = [sign_flip_p(generator.integers(0, 5, 40) - generator.integers(0, 5, 40), seed=0) for _ in range(200)]
    assert sum(p is not None and p < 0.05 for p in found) / len(found) < 0.1


def test_with_fewer_prompts_nothing_can_be_told_from_chance() -> None:
    least = [sign_flip_p([1.0] * n, seed=0) for n in (FEWEST_PROMPTS - 1, FEWEST_PROMPTS)]
    assert least[0] is not None
    assert least[1] is not None
    assert least[0] > 0.05 > least[1]


@given(votes=st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=12))
def test_a_majority_lies_between_none_and_all_and_the_order_of_answers_does_not_matter(votes) -> None:
    readings, passes = zip(*votes, strict=True)
    found = majority(readings, passes)
    assert 0 <= found <= 1
    assert majority(readings[::-1], passes[::-1]) == pytest.approx(found)
    if len(set(readings)) == 1:
        assert found == sum(passes) / len(passes)


def test_a_ratio_is_of_sums_and_a_difference_pairs_its_prompts() -> None:
    generator = np.random.default_rng(0)
    size = generator.integers(10, 1000, 60)
    ours = [(float(n), 1.0) for n in size]
    theirs = [(float(n + 50), 1.0) for n in size]
    alone, paired = ratio_with_interval(ours, seed=0), ratio_difference(ours, theirs, seed=0)
    assert alone.value == pytest.approx(size.mean())
    assert (paired.value, paired.low, paired.high) == (pytest.approx(-50), pytest.approx(-50), pytest.approx(-50))
