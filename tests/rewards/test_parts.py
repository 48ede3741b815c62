"""What a verifier may return, and what becomes of it."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rewards.exact import exact
from asyncrl.rewards.parts import INVALID, NAN, NONE, check_weights, judge, odd_names, weighted_sum

FINITE = st.floats(-1e6, 1e6)


class Unfloatable:
    def __float__(self) -> float:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("returned", "parts"),
    [
        (0.5, {"reward": 0.5}),
        (True, {"reward": 1.0}),
        (3, {"reward": 3.0}),
        ({"a": np.float32(0.5), "b": np.int64(2)}, {"a": 0.5, "b": 2.0}),
        ({"a": Fraction(1, 4), "b": Decimal("0.5")}, {"a": 0.25, "b": 0.5}),
        ({"a": np.array(1.0)}, {"a": 1.0}),
    ],
)
def test_anything_that_is_a_number_is_a_part(returned: Any, parts: dict[str, float]) -> None:
    verdict = judge(returned)
    assert (verdict.parts, verdict.failure) == (parts, "")
    assert all(type(value) is float for value in verdict.parts.values())


@pytest.mark.parametrize(
    ("returned", "failure", "parts"),
    [
        (None, NONE, {"reward": None}),
        (math.nan, NAN, {"reward": None}),
        (math.inf, INVALID, {"reward": None}),
        ("1.0", INVALID, {"reward": None}),
        ([1.0], INVALID, {"reward": None}),
        (1j, INVALID, {"reward": None}),
        (10**400, INVALID, {"reward": None}),
        ([0.0, 1.0], INVALID, {"reward": None}),
        ((), INVALID, {"reward": None}),
        (np.zeros(3), INVALID, {"reward": None}),
        (Unfloatable(), INVALID, {"reward": None}),
        ({}, INVALID, {}),
        ({1: 1.0}, INVALID, {}),
        ({"a": 1.0, "b": None, "c": math.nan}, NONE, {"a": 1.0, "b": None, "c": None}),
        ({"a": Decimal("NaN"), "b": 1}, NAN, {"a": None, "b": 1.0}),
    ],
)
def test_what_is_no_number_is_a_failure_under_its_own_name(
    returned: Any, failure: str, parts: dict[str, float | None]
) -> None:
    verdict = judge(returned)
    assert (verdict.failure, verdict.parts) == (failure, parts)
    assert verdict.detail


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ([1.0], "1 values (list)"),
        ([0.0] * 8, "8 values (list)"),
        (np.zeros(3), "3 values (ndarray)"),
        ((), "0 values (tuple)"),
    ],
)
def test_scores_for_a_whole_group_are_refused_with_the_fix(returned: Any, said: str) -> None:
    detail = judge(returned).detail
    assert detail.startswith(f"score returned {said}; it is called once for each answer: return one number")


def test_an_array_with_one_element_is_a_number() -> None:
    assert judge(torch.ones(1)).parts == {"reward": 1.0}
    assert judge(torch.tensor(1.0)).parts == {"reward": 1.0}


@pytest.mark.parametrize(
    ("parts", "expected", "weights", "said"),
    [
        (["a", "b"], None, [], ""),
        (["a", "b"], ["b", "a"], ["a"], ""),
        (["a"], ["a", "b"], [], "score returned the parts 'a', and for the first answer 'a', 'b': return the same"),
        (["a", "b"], ["a"], [], "score returned the parts 'a', 'b', and for the first answer 'a'"),
        (
            ["correct"],
            None,
            ["corect"],
            "part_weights() has 'corect', and score returned 'correct': give both the same",
        ),
    ],
)
def test_parts_have_the_same_names_for_each_answer_and_in_the_weights(
    parts: list[str], expected: list[str] | None, weights: list[str], said: str
) -> None:
    complaint = odd_names(parts, expected, weights)
    assert complaint.startswith(said)
    assert bool(complaint) == bool(said)


@given(parts=st.dictionaries(st.text(), FINITE, min_size=1), weights=st.dictionaries(st.text(), FINITE))
def test_the_reward_is_the_weighted_sum_and_a_part_without_weight_weighs_one(
    parts: dict[str, float], weights: dict[str, float]
) -> None:
    expected = sum(value * weights.get(name, 1.0) for name, value in parts.items())
    assert weighted_sum(parts, weights) == expected


def test_one_unscored_part_leaves_the_whole_unscored_even_at_weight_zero() -> None:
    assert math.isnan(weighted_sum({"a": 1.0, "b": None}, {"b": 0.0}))


@pytest.mark.parametrize("weights", [{"a": math.nan}, {"a": "1"}, {"a": None}, {1: 1.0}, 3.0])
def test_weights_must_be_finite_numbers_by_name(weights: Any) -> None:
    with pytest.raises(ValueError, match="part_weights"):
        check_weights(weights)
    assert check_weights({}) == {}
    assert check_weights({"a": True}) == {"a": 1.0}


def test_exact_wants_equal_text_and_an_answer_that_ended_itself() -> None:
    assert exact("1284", "1284", "stop") == 1.0
    assert exact("1284", "1284", "length") == 0.0
    assert exact("12", "1284", "stop") == 0.0
