"""Which of several tasks an ordinal goes to."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.tasks.shares import LONGEST_PERIOD, Shares, evenly

WEIGHTS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6)


@settings(max_examples=40)
@given(weights=WEIGHTS, first=st.integers(0, 2**40), span=st.integers(1, 300))
def test_each_task_counts_its_own_ordinals_without_a_gap(weights: list[float], first: int, span: int) -> None:
    shares = Shares(weights)
    counted: dict[int, int] = {}
    for ordinal in range(first, first + span):
        task, drawn = shares.deal(ordinal)
        assert drawn == counted.get(task, drawn - 1) + 1
        counted[task] = drawn


@settings(max_examples=40)
@given(weights=WEIGHTS, until=st.integers(1, 1000))
def test_every_beginning_has_the_mix_that_was_asked_for(weights: list[float], until: int) -> None:
    shares = Shares(weights)
    had = Counter(shares.deal(ordinal)[0] for ordinal in range(until))
    for task, weight in enumerate(weights):
        # Two: whole ordinals. The rest: weights without a common measure, and one ordinal in a period at least.
        assert abs(had[task] - until * weight / sum(weights)) <= 2 + len(weights) * until / LONGEST_PERIOD


@settings(max_examples=40)
@given(
    weights=st.lists(st.floats(1e-9, 1e9) | st.integers(1, 10**9), min_size=1, max_size=6),
    first=st.integers(0, 2**40),
    span=st.integers(1, 500),
)
def test_every_stretch_of_a_run_has_the_mix_wherever_it_begins(weights: list[float], first: int, span: int) -> None:
    shares = Shares(weights)
    had = Counter(shares.deal(ordinal)[0] for ordinal in range(first, first + span))
    for task, weight in enumerate(weights):
        # Twice the two of a beginning, since a stretch is what lies between two of them.
        assert abs(had[task] - span * weight / sum(weights)) <= 4 + len(weights) * span / LONGEST_PERIOD


@settings(max_examples=20)
@given(weights=WEIGHTS, ordinals=st.lists(st.integers(0, 2**40), max_size=20))
def test_whose_turn_it_is_depends_on_the_weights_and_the_ordinal_alone(
    weights: list[float], ordinals: list[int]
) -> None:
    one, other = Shares(weights), Shares([2 * weight for weight in weights])
    found = {ordinal: one.deal(ordinal) for ordinal in ordinals}
    assert {ordinal: other.deal(ordinal) for ordinal in sorted(ordinals, reverse=True)} == found


def test_a_share_of_small_whole_weights_is_exact_for_ever() -> None:
    shares = Shares([0.5, 1.0, 0.25])
    for start in (0, 7 * 10**12):
        assert Counter(shares.deal(start + n)[0] for n in range(7)) == {0: 2, 1: 4, 2: 1}


def test_the_order_is_the_same_on_every_machine_and_in_every_release() -> None:
    """A resumed run continues the order of the run it resumes: changing these numbers breaks it."""
    shares = Shares([3.0, 1.0, 2.0])
    assert [shares.deal(n) for n in range(7)] == [(0, 0), (2, 0), (0, 1), (1, 0), (2, 1), (0, 2), (0, 3)]


def test_no_task_is_left_out_however_little_it_weighs() -> None:
    shares = Shares([1e9, 1.0 / 3.0])
    assert {shares.deal(n)[0] for n in range(2 * LONGEST_PERIOD)} == {0, 1}


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5))
def test_lists_take_turns_until_each_is_through(sizes: list[int]) -> None:
    found = [evenly(index, sizes) for index in range(sum(sizes))]
    assert sorted(found) == [(which, place) for which, size in enumerate(sizes) for place in range(size)]
    for end in range(len(found) + 1):
        had = Counter(which for which, _ in found[:end])
        going = [had[which] for which, size in enumerate(sizes) if had[which] < size]
        assert not going or max(had.values(), default=0) - min(going) <= 1, "none is ahead of one that is not through"


def test_lists_of_any_length_cost_the_same() -> None:
    assert evenly(10**12, [2**50, 3, 2**50]) == (2, 3 + (10**12 - 9) // 2)


@pytest.mark.parametrize("index", [-1, 6])
def test_beyond_the_last_there_is_nothing(index: int) -> None:
    with pytest.raises(IndexError, match="of 6"):
        evenly(index, [3, 1, 2])
