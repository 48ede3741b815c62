"""Shaping by its formulas, and from parts to what is trained on and what success is measured by."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.rewards import Declared, Exact, Format, Length, Overlong, declared
from asyncrl.rewards.base import Finding
from asyncrl.rewards.shaping import Rule, Shape, length, matches, overlong

LIMITS = st.integers(2, 64).flatmap(lambda most: st.tuples(st.just(most), st.integers(1, most - 1)))


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(1, 0.0), (15, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (19, -0.75), (20, -1.0)]
)
def test_the_over_long_penalty_begins_where_the_buffer_does_and_is_whole_at_the_limit(
    tokens: int, penalty: float
) -> None:
    assert overlong(tokens, "stop", max_tokens=20, buffer_tokens=4) == penalty


@given(LIMITS, st.integers(1, 64))
def test_the_over_long_penalty_never_grows_smaller_with_length_and_stays_between_minus_one_and_nothing(
    limits: tuple[int, int], tokens: int
) -> None:
    most, buffer = limits
    here, longer = (overlong(n, "stop", max_tokens=most, buffer_tokens=buffer) for n in (tokens, tokens + 1))
    assert -1 <= longer <= here <= 0
    assert (here == 0) == (tokens <= most - buffer)
    assert (here == -1) == (tokens >= most)


@given(LIMITS, st.integers(1, 64))
def test_an_answer_that_was_cut_is_over_long_wherever_it_was_cut(limits: tuple[int, int], tokens: int) -> None:
    assert overlong(tokens, "length", max_tokens=limits[0], buffer_tokens=limits[1]) == -1.0


@given(st.integers(1, 64), st.data())
def test_the_length_part_is_nothing_at_the_target_and_falls_alike_on_both_sides(most: int, data: st.DataObject) -> None:
    target = data.draw(st.integers(0, most))
    apart = data.draw(st.integers(0, min(target, most - target)))
    below, above = (length(n, target_tokens=target, max_tokens=most) for n in (target - apart, target + apart))
    assert below == above == -apart / most
    assert math.copysign(1.0, length(target, target_tokens=target, max_tokens=most)) == 1.0, "no minus in front of 0"


@pytest.mark.parametrize(
    ("text", "finish_reason", "found"),
    [
        ("<think>a\nb</think> 4", "stop", 1.0),
        ("  <think></think>4\n", "stop", 1.0),
        ("<think>a</think>", "stop", 0.0),
        ("so: <think>a</think> 4", "stop", 0.0),
        ("<think>a</think> 4", "length", 0.0),
        ("", "stop", 0.0),
    ],
)
def test_a_format_is_of_the_whole_answer_over_its_lines_and_of_one_that_ended(
    text: str, finish_reason: str, found: float
) -> None:
    assert matches(text, finish_reason, re.compile(r"<think>.*</think>\s*\d+", re.DOTALL)) == found
    shape = Shape(Format(pattern=r"<think>.*</think>\s*\d+"), max_tokens=8)
    answer = {"text": text, "token_ids": range(5), "finish_reason": finish_reason}
    assert shape.verify({}, answer) == Finding({"format": found}, "" if found else "wrong_format")


def test_the_parts_of_a_recipe_have_their_types_as_names_or_those_they_are_given_and_shaping_is_a_constraint() -> None:
    parts = [Exact(weight=2.0), Overlong(buffer_tokens=4, weight=0.5), Length(target_tokens=10, weight=-1.0)]
    assert declared([*parts, Exact(name="again", role="violation")]) == {
        "exact": Declared(2.0, "outcome"),
        "overlong": Declared(0.5, "constraint"),
        "length": Declared(-1.0, "constraint"),
        "again": Declared(1.0, "violation"),
    }
    answer = {"text": "any", "token_ids": range(18), "finish_reason": "stop"}
    found = [Shape(part, max_tokens=20).verify({}, answer) for part in parts if not isinstance(part, Exact)]
    assert found == [Finding({"overlong": -0.5}), Finding({"length": -0.4})]


@given(
    st.dictionaries(st.sampled_from(["exact", "format", "length"]), st.floats(-5, 5), min_size=1),
    st.floats(0.1, 10),
    st.tuples(st.floats(-3, -0.1), st.floats(0.1, 3)),
)
def test_scale_comes_before_the_clip_and_the_outcome_knows_neither_nor_shaping(
    parts: dict[str, float], scale: float, clip: tuple[float, float]
) -> None:
    rule, weights = Rule(frozenset({"format", "length"}), frozenset(), scale, clip), {"exact": 2.0, "length": 0.5}
    summed = 2.0 * parts.get("exact", 0.0) + parts.get("format", 0.0) + 0.5 * parts.get("length", 0.0)
    assert rule.reward(parts, weights) == pytest.approx(min(max(scale * summed, clip[0]), clip[1]))
    assert rule.outcome(parts, weights) == 2.0 * parts.get("exact", 0.0)


def test_a_part_without_a_number_leaves_the_reward_unscored_whatever_the_clip() -> None:
    assert math.isnan(Rule(scale=2.0).reward({"exact": None, "length": -1.0}, {}))
    assert math.isnan(Rule(clip=(-1.0, 1.0)).reward({"exact": None}, {}))
