"""pass@k is unbiased, and intervals cover what they should."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from asyncrl.collectors.evaluation.statistics import (
    FEWEST_PROMPTS,
    LEVEL,
    majority,
    mean_with_interval,
    pass_at_k,
    rate_difference,
    rate_with_interval,
    ratio_difference,
    ratio_with_interval,
    share_with_interval,
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


RATES = np.random.default_rng(0)


def rates_of(kind: str, rate: float, prompts: int, samples: int) -> NDArray[np.float64]:
    """Pass rates of prompts that are all alike, somewhat different, or each always or never solved."""
    if kind == "alike":
        of_prompts = np.full(prompts, rate)
    elif kind == "between":
        of_prompts = RATES.beta(rate, 1 - rate, prompts)
    else:
        of_prompts = (RATES.random(prompts) < rate).astype(np.float64)
    return RATES.binomial(samples, of_prompts) / samples


@pytest.mark.parametrize("kind", ["alike", "between", "apart"])
@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("rate", [0.02, 0.3, 0.9, 0.98])
def test_intervals_of_rates_cover_what_they_say_near_the_ends_too(kind: str, samples: int, rate: float) -> None:
    for prompts in (32, 128):
        found = [rate_with_interval(rates_of(kind, rate, prompts, samples)) for _ in range(400)]
        assert sum(one.low <= rate <= one.high for one in found) / len(found) > 0.89


def test_the_bootstrap_of_a_rate_near_an_end_covers_nothing() -> None:
    """The control: what the test above does not accept, of half of such evaluations no pass and the width 0."""
    found = [mean_with_interval(rates_of("apart", 0.02, 32, 1), seed=0) for _ in range(100)]
    assert sum(one.low <= 0.02 <= one.high for one in found) / len(found) < 0.6


@pytest.mark.parametrize("losing", [0.02, 0.05, 0.3])
@pytest.mark.parametrize("noise", [0, 4])
def test_intervals_of_differences_cover_a_few_prompts_that_are_lost(losing: float, noise: int) -> None:
    for prompts in (32, 128):
        found = []
        for _ in range(400):
            lost = RATES.random(prompts) < losing
            ours, theirs = (RATES.binomial(4, 0.5, prompts) / 4 if noise else np.ones(prompts) for _ in range(2))
            found.append(rate_difference(np.where(lost, 0.0, ours) - np.where(lost, 1.0, theirs)))
        assert sum(one.low <= -losing <= one.high for one in found) / len(found) > 0.91


def test_the_bootstrap_of_few_lost_prompts_rules_out_what_is_there() -> None:
    """The control: of 32 prompts one in twenty is lost, and each sixth evaluation would exclude a loss of 2 points."""
    lost = [-(RATES.random(32) < 0.05).astype(np.float64) for _ in range(200)]
    sides = [[mean_with_interval(one, seed=0) for one in lost], [rate_difference(one) for one in lost]]
    bootstrap, own = (sum(one.low >= -0.02 for one in side) / len(side) for side in sides)
    assert bootstrap > 0.1
    assert own == 0


@given(x=st.integers(0, 40), n=st.integers(1, 40))
def test_of_single_answers_the_interval_is_that_of_the_score_test(x: int, n: int) -> None:
    """Wilson's, and its ends those rates from which the share is just so many standard errors away; where prompts
    differ a little wider, as it is not known how much they do."""
    x = min(x, n)
    found = rate_with_interval([1.0] * x + [0.0] * (n - x))
    assert found.value == pytest.approx(x / n)
    for end in (found.low, found.high):
        if 0 < end < 1:
            assert abs(x / n - end) >= 1.9599 * math.sqrt(end * (1 - end) / n) - 1e-9
    assert (found.low == 0) == (x == 0)
    assert (found.high == 1) == (x == n)


def test_as_many_draws_are_counted_as_prompts_are_worth() -> None:
    """Four answers to each of 50 prompts are 50 draws if a prompt's all come out the same, and 200 if they do so by
    chance."""
    apart = share_with_interval([(4.0, 4.0), (0.0, 4.0)] * 25)
    chance = share_with_interval(
        [(float(passing), 4.0) for passing in (0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 4)] * 3
    )
    assert apart.high - apart.low == pytest.approx(2 * 1.96 * 0.5 / math.sqrt(50), abs=0.02)
    assert chance.high - chance.low == pytest.approx(2 * 1.96 * 0.5 / math.sqrt(4 * 48), abs=0.02)


@given(values=st.lists(st.floats(-1, 1), min_size=1, max_size=20), width=st.sampled_from([1.0, 2.0, 3.5]))
def test_a_difference_lies_in_its_interval_which_turns_round_with_the_sides(values: list[float], width: float) -> None:
    found, turned = rate_difference(values, width=width), rate_difference([-value for value in values], width=width)
    assert found.low - 1e-9 <= found.value <= found.high + 1e-9
    assert found.low < found.high
    assert (turned.low, turned.high) == (pytest.approx(-found.high), pytest.approx(-found.low))


@given(values=st.lists(st.floats(0, 1), min_size=1, max_size=20), low=st.floats(-3, 0), width=st.floats(1, 5))
def test_rates_between_other_bounds_are_rates_all_the_same(values: list[float], low: float, width: float) -> None:
    found = rate_with_interval(values)
    moved = rate_with_interval([low + width * value for value in values], bounds=(low, low + width))
    assert (moved.low, moved.high) == (
        pytest.approx(low + width * found.low, abs=1e-6),
        pytest.approx(low + width * found.high, abs=1e-6),
    )


def test_no_prompt_gives_no_number() -> None:
    for found in (mean_with_interval([], seed=0), rate_with_interval([]), rate_difference([]), share_with_interval([])):
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
