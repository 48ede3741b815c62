"""Advantages: the formulas, and the groups that teach nothing."""

from __future__ import annotations

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
