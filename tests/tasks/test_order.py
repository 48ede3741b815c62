"""The order of prompts: a permutation per epoch, from nothing but seed and ordinal."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.tasks.order import permute, row_index

PINNED = [5, 0, 2, 4, 9, 8, 3, 6, 7, 1]
PINNED_HUGE = 977476047370


@given(rows=st.integers(1, 300), epoch=st.integers(0, 5), seed=st.integers(0, 2**63))
def test_every_epoch_shows_every_row_once(rows: int, epoch: int, seed: int) -> None:
    ordinals = range(epoch * rows, (epoch + 1) * rows)
    assert sorted(row_index(n, rows, seed=seed, shuffle=True) for n in ordinals) == list(range(rows))


@given(rows=st.integers(2**39, 2**40), start=st.integers(0, 2**50), seed=st.integers(0, 2**63))
def test_any_number_of_rows_costs_the_same_and_nearby_ordinals_do_not_collide(rows: int, start: int, seed: int) -> None:
    start -= start % rows
    found = [row_index(start + n, rows, seed=seed, shuffle=True) for n in range(20)]
    assert len(set(found)) == 20
    assert all(0 <= index < rows for index in found)


@given(ordinal=st.integers(0, 2**40), rows=st.integers(1, 2**20), seed=st.integers(0, 9))
def test_without_shuffle_it_is_file_order_over_and_over(ordinal: int, rows: int, seed: int) -> None:
    assert row_index(ordinal, rows, seed=seed, shuffle=False) == ordinal % rows


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [row_index(epoch * 50 + n, 50, seed=seed, shuffle=True) for n in range(50)]

    orders = [order(seed, epoch) for seed in range(4) for epoch in range(4)]
    assert len({tuple(one) for one in orders}) == len(orders)
    assert list(range(50)) not in orders


def test_the_order_is_the_same_on_every_machine_and_in_every_release() -> None:
    """A resumed run continues the order of the run it resumes: changing these numbers breaks it."""
    assert [row_index(n, 10, seed=0, shuffle=True) for n in range(10)] == PINNED
    assert row_index(123_456_789, 2**40, seed=7, shuffle=True) == PINNED_HUGE


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_each_row_of_a_small_file_is_equally_likely_to_come_first(size: int) -> None:
    """Chi-square over fixed seeds; 30 is beyond the 0.999 quantile for up to 7 degrees of freedom."""
    draws = 4000
    counts = Counter(row_index(0, size, seed=seed, shuffle=True) for seed in range(draws))
    expected = draws / size
    assert sum((counts[row] - expected) ** 2 / expected for row in range(size)) < 30


def test_a_permutation_beyond_machine_integers_stays_in_its_range() -> None:
    size = 10**100
    assert all(0 <= permute(size - n, size, key="k") < size for n in range(1, 10))


@pytest.mark.parametrize(("ordinal", "rows"), [(-1, 10), (0, 0)])
def test_there_is_no_row_for_a_negative_ordinal_or_an_empty_file(ordinal: int, rows: int) -> None:
    with pytest.raises(ValueError, match="there must be a row"):
        row_index(ordinal, rows, seed=0, shuffle=True)
