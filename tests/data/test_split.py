"""Which prompts are held out: no prompt is on both sides, and each keeps its side."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.errors import DataError
from asyncrl.data.rows import Record
from asyncrl.data.split import prompt_key, shared_prompts, split_heldout

OLD = ["3", "5", "31", "40", "43", "47", "52", "62", "69", "81", "83", "85", "89", "98"]


def records(prompts: list[str]) -> list[Record]:
    return [Record(f"{row:06}", prompt, "a", {}) for row, prompt in enumerate(prompts)]


@given(st.lists(st.text(alphabet="abc \n", max_size=4), min_size=2, max_size=40))
def test_a_split_loses_no_row_and_no_prompt_is_on_both_sides(prompts: list[str]) -> None:
    rows = records(prompts)
    if len({prompt_key(row.prompt) for row in rows}) < 2:
        with pytest.raises(DataError, match="same prompt"):
            split_heldout(rows)
        return
    train, heldout = split_heldout(rows)
    assert train
    assert heldout
    assert sorted([*train, *heldout], key=lambda record: record.id) == rows
    assert shared_prompts(train, heldout) == 0


def test_about_one_prompt_in_ten_is_held_out_and_keeps_its_side_when_rows_are_added() -> None:
    _, before = split_heldout(records([f"question {n}" for n in range(2000)]))
    _, after = split_heldout(records([f"question {n}" for n in range(4000)]))
    assert 150 < len(before) < 250
    assert {record.prompt for record in before} <= {record.prompt for record in after}


def test_white_space_and_the_form_of_a_prompt_do_not_make_it_another() -> None:
    assert prompt_key("what is\n 2+2?") == prompt_key([{"role": "user", "content": " what is 2+2? "}])
    assert prompt_key("a") != prompt_key([{"role": "system", "content": "a"}])


def test_the_sides_are_those_that_earlier_versions_chose() -> None:
    """A run that goes on, and one that is compared with an old one, must not train what was held out."""
    _, held = split_heldout(records([f"question {n}" for n in range(100)]))
    assert [record.prompt.removeprefix("question ") for record in held if isinstance(record.prompt, str)] == OLD
