"""Advantages: the formulas, and the groups that teach nothing."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.learners.advantages import Kind, advantages

KINDS = get_args(Kind)


def of(rewards: list[float], kind: Kind, groups: list[int] | None = None) -> list[float]:
    index = np.array(groups if groups is not None else [0] * len(rewards), np.int64)
    return advantages(np.array(rewards, np.float64), index, kind).values.tolist()


def test_each_kind_is_its_formula() -> None:
    r = [1.0, 0.0, 0.0, 3.0]
    s = math.sqrt(((1 - 1) ** 2 + 1 + 1 + 4) / 3)
    assert of(r, "group-mean") == pytest.approx([0, -1, -1, 2])
    assert of(r, "group-mean-std") == pytest.approx([0, -1 / (s + 1e-4), -1 / (s + 1e-4), 2 / (s + 1e-4)])
    assert of(r, "leave-one-out") == pytest.approx([1 - 1, 0 - 4 / 3, 0 - 4 / 3, 3 - 1 / 3])


@pytest.mark.parametrize("kind", KINDS)
def test_equal_rewards_give_exactly_zero(kind: Kind) -> None:
    for value in (0.0, 0.1, 1 / 3, 1e30):
        assert of([value] * 7, kind) == [0.0] * 7


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_that_float32_cannot_tell_apart_stay_small(kind: Kind) -> None:
    assert max(map(abs, of([1.0, 1.0 + 1e-9, 1.0], kind))) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_unscored_members_do_not_count_and_get_zero(kind: Kind) -> None:
    with_unscored = of([1.0, math.nan, 0.0, math.nan], kind)
    assert [with_unscored[0], with_unscored[2]] == of([1.0, 0.0], kind)
    assert with_unscored[1] == with_unscored[3] == 0.0


@given(
    rewards=st.lists(st.one_of(st.floats(-10, 10, width=16), st.just(math.nan)), min_size=2, max_size=10),
    other=st.floats(-3, 3, width=16),
)
def test_leave_one_out_compares_a_member_with_the_others_that_are_there(rewards: list[float], other: float) -> None:
    """Against the definition, for any members that failed; another group changes nothing."""
    found = of([*rewards, other, 1.0], "leave-one-out", [0] * len(rewards) + [1, 1])
    for i, reward in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if j != i and not math.isnan(r)]
        expected = 0.0 if math.isnan(reward) or not others else reward - sum(others) / len(others)
        assert found[i] == pytest.approx(expected, abs=1e-9)


def test_leave_one_out_over_those_present_has_no_bias() -> None:
    """Two answers of probability p and 1 - p, rewards 1 and 0, of three members one fails at random: over all outcomes
    the mean of advantage x score function is the gradient of the expected reward, p (1 - p) in the logit."""
    p = 0.3
    mean = 0.0
    for answers in itertools.product((1.0, 0.0), repeat=3):
        chance = math.prod(p if answer else 1 - p for answer in answers)
        for failed in range(3):
            rewards = [math.nan if member == failed else answer for member, answer in enumerate(answers)]
            worth = of(rewards, "leave-one-out")
            terms = [
                a * (answer - p)
                for member, (a, answer) in enumerate(zip(worth, answers, strict=True))
                if member != failed
            ]
            mean += chance / 3 * sum(terms) / 2
    assert mean == pytest.approx(p * (1 - p))


@pytest.mark.parametrize("kind", KINDS)
def test_groups_without_a_comparison_are_zero_and_counted(kind: Kind) -> None:
    rewards = np.array([1.0, math.nan, math.nan, math.nan, 0.5, 0.5, 1.0, 0.0])
    result = advantages(rewards, np.repeat(np.arange(4), 2), kind)
    assert result.values[:6].tolist() == [0.0] * 6
    assert (result.alone, result.unscored, result.equal) == (1, 1, 1)
    assert result.values[6] > 0 > result.values[7]


@given(
    rewards=st.lists(st.floats(-10, 10), min_size=2, max_size=12), kind=st.sampled_from(KINDS), shift=st.floats(-5, 5)
)
def test_advantages_sum_to_zero_and_ignore_a_common_shift(rewards: list[float], kind: Kind, shift: float) -> None:
    values = of(rewards, kind)
    assert sum(values) == pytest.approx(0, abs=1e-6)
    assert of([r + shift for r in rewards], kind) == pytest.approx(values, abs=1e-6)
