"""The parts `regex` and `f1`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.errors import RecipeError
from asyncrl.config.loading import load_recipe
from asyncrl.config.rewards import F1, Regex
from asyncrl.rewards.base import BadRow, Finding
from asyncrl.rewards.text import PatternMatch, WordOverlap, f1


def found(by: Any, text: str, expected: object = "42", finish_reason: str = "stop") -> Finding:
    return by.verify({"id": "7", "answer": expected}, {"text": text, "finish_reason": finish_reason})


GROUP, PLAIN = PatternMatch(Regex(pattern=r"Answer: (.+)")), PatternMatch(Regex(pattern=r"\d{3}"))


def test_the_group_of_the_last_match_is_compared_with_the_rows_answer() -> None:
    assert found(GROUP, "Answer: 41\nAnswer: 42 ") == Finding({"regex": 1.0}, read="42")
    assert found(GROUP, "Answer: 42\nAnswer: 41").wrong == "wrong_answer"
    assert found(GROUP, "42").wrong == "no_answer"
    assert found(GROUP, "Answer: 42", finish_reason="length").wrong == "cut_off"
    assert found(GROUP, "Answer: b", ["a", "b"]).parts == {"regex": 1.0}


def test_a_pattern_without_a_group_is_found_or_not_whatever_the_row() -> None:
    PLAIN.check({"id": "7", "answer": None})
    assert found(PLAIN, "it is 123", None).parts == {"regex": 1.0}
    assert found(PLAIN, "it is 12", None) == Finding({"regex": 0.0}, "no_answer", r"nothing matches '\\d{3}'")


def test_a_group_that_took_no_part_in_the_match_is_an_empty_answer() -> None:
    assert found(PatternMatch(Regex(pattern="Answer:( .+)?")), "Answer:").wrong == "wrong_answer"


@pytest.mark.parametrize("by", [GROUP, WordOverlap(F1())])
@pytest.mark.parametrize("answer", [None, "", "  ", 1.5, {}, [], [None]])
def test_a_row_without_text_to_compare_with_is_named(by: Any, answer: object) -> None:
    with pytest.raises(BadRow, match="row 7: the answer is"):
        by.check({"id": "7", "answer": answer})


@pytest.mark.parametrize(
    ("text", "expected", "value"),
    [
        ("The cat sat.", "a cat sat", 1.0),
        ("the cat sat on the mat", "cat", 0.4),  # precision 1/4, recall 1
        ("cat cat", "cat", 2 / 3),  # a word counts as often as it occurs
        ("Denver Broncos!", "denver   broncos", 1.0),
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("the", "a", 1.0),
    ],
)
def test_f1_is_squads(text: str, expected: str, value: float) -> None:
    assert f1(text, expected) == pytest.approx(value)


@given(st.text(), st.text())
def test_f1_is_symmetric_and_between_nothing_and_one(one: str, other: str) -> None:
    assert 0.0 <= f1(one, other) == f1(other, one) <= 1.0
    assert f1(one, one) == 1.0


def test_the_best_of_several_expected_answers_counts_and_less_than_one_has_a_class() -> None:
    overlap = WordOverlap(F1())
    assert found(overlap, "the cat", ["a dog", "cat"]).parts == {"f1": 1.0}
    assert found(overlap, "black cat", "cat").wrong == "partial_answer"
    assert found(overlap, "dog", "cat").wrong == "wrong_answer"
    assert found(overlap, "cat", "cat", "length") == Finding({"f1": 0.0}, "cut_off")


def test_a_pattern_that_is_none_is_refused_before_the_run() -> None:
    part = '{type: regex, pattern: "("}'
    with pytest.raises(RecipeError, match="no regular expression of Python"):
        load_recipe("tiny-reverse", overrides=[f"task.rewards=[{part}]"])
