"""The built-in task: its rows, its two splits, its score."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.tasks.base import Answer, Row, TaskError
from asyncrl.tasks.reverse import Reverse

LENGTHS = st.tuples(st.integers(1, 30), st.integers(1, 30)).map(lambda pair: (min(pair), max(pair)))


def digits_of(row: Row) -> str:
    assert isinstance(row.prompt, str)
    return row.prompt.removeprefix("reverse ")


@given(digits=LENGTHS, index=st.integers(0, 10**6), heldout=st.booleans())
def test_a_row_asks_for_a_string_of_an_allowed_length_and_holds_its_reverse(
    digits: tuple[int, int], index: int, heldout: bool
) -> None:
    split = "heldout" if heldout else "train"
    rows = Reverse(digits).rows(split)
    row = rows[index % len(rows)]
    text = digits_of(row)
    assert digits[0] <= len(text) <= digits[1]
    assert text.isdigit()
    assert row.answer == text[::-1]
    assert row == Reverse(digits).rows(split)[index % len(rows)]


@pytest.mark.parametrize("digits", [(1, 1), (1, 2), (2, 4), (3, 3), (4, 4)])
def test_no_held_out_string_is_ever_trained_on_and_together_they_are_all(digits: tuple[int, int]) -> None:
    task = Reverse(digits)
    train, heldout = ({digits_of(row) for row in task.rows(split)} for split in ("train", "heldout"))
    assert not train & heldout
    every = {f"{number:0{length}d}" for length in range(digits[0], digits[1] + 1) for number in range(10**length)}
    assert train | heldout == every
    assert len(heldout) * 10 == len(every)


def test_a_string_is_on_the_same_side_whatever_the_lengths_of_the_recipe() -> None:
    held = {digits_of(row) for row in Reverse((2, 3)).rows("heldout")}
    assert not held & {digits_of(row) for row in Reverse((3, 3)).rows("train")}
    assert not held & {digits_of(row) for row in Reverse((1, 4)).rows("train")}


def test_lengths_take_turns_and_the_first_held_out_rows_differ() -> None:
    rows = Reverse((3, 6)).rows("heldout")[:400]
    assert [len(digits_of(row)) for row in rows[:8]] == [3, 4, 5, 6, 3, 4, 5, 6]
    assert len({digits_of(row) for row in rows}) == 400
    assert len({row.id for row in rows}) == 400


def test_rows_are_a_sequence_with_negative_indices_and_an_end() -> None:
    rows = Reverse((1, 1)).rows("train")
    assert len(list(rows)) == len(rows) == 9
    assert rows[-1] == rows[8]
    with pytest.raises(IndexError):
        rows[9]


def test_len_holds_for_strings_of_a_hundred_digits() -> None:
    rows = Reverse((3, 100)).rows("train")
    assert len(digits_of(rows[len(rows) - 1])) <= 100


@pytest.mark.parametrize(
    ("text", "finish_reason", "expected"),
    [("1284", "stop", 1.0), ("1284", "length", 0.0), ("4821", "stop", 0.0), (" 1284", "stop", 0.0), ("", "stop", 0.0)],
)
def test_only_the_exact_string_that_the_model_ended_itself_scores(
    text: str, finish_reason: str, expected: float
) -> None:
    row = Row("train-0", "reverse 4821", "1284")
    assert Reverse((3, 6)).score(row, Answer(text, (), finish_reason)).parts == {"exact": expected}


@pytest.mark.parametrize("digits", [(6, 3), (0, 3), (3, 101)])
def test_impossible_lengths_are_refused_with_the_value(digits: tuple[int, int]) -> None:
    with pytest.raises(TaskError, match=rf"\[{digits[0]}, {digits[1]}\]"):
        Reverse(digits)
