"""The part `choice`: which letter an answer names, and which rows it can be asked of."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.rewards import Choice
from asyncrl.rewards.base import BadRow
from asyncrl.rewards.choice import ChoiceAnswer, letters

OPTIONS = ["a dog", "two cats", "a horse", "none"]
LETTERS, TEXTS = ChoiceAnswer(Choice()), ChoiceAnswer(Choice(options="choices"))


def row(answer: object, options: object = OPTIONS) -> dict[str, Any]:
    return {"id": "7", "answer": answer, "info": {"choices": options}}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (r"\boxed{B}", "B"),
        (r"\boxed{b}", "B"),
        (r"\boxed{\text{(B)}}", "B"),
        (r"\boxed{\textbf{B}}", "B"),
        (r"\boxed{B. two cats}", "B"),
        (r"Answer: A. No, wait: \boxed{B}", "B"),
        (r"\boxed{E}", ""),
        (r"\boxed{B", ""),
        (r"\boxed{A, B}", "AB"),
        ("Answer: B", "B"),
        ("answer is (B).", "B"),
        ("The answer is: **B**", "B"),
        ("**Answer:** B", "B"),
        ("Final answer: option C", "C"),
        ("Answer: A\nAnswer: B", "B"),
        ("Answer: B because A is wrong", "B"),
        ("Answer: A or B", "AB"),
        ("Answer: B, C", "BC"),
        ("The correct answer is **(B) two cats**", "B"),
        ("Answer: A dog", "A"),
        ("B", "B"),
        ("b.", "B"),
        ("(B)", "B"),
        ("**B**", "B"),
        ("B) two cats", "B"),
        ("(A) is too small, so it must be (B)", "AB"),
        ("two cats", "B"),
        ("I count.\nThere are two cats.", "B"),
        ("a dog and two cats", "AB"),
        # several, however they are listed: none of them is right
        (r"\boxed{A B C D}", "ABCD"),
        (r"\boxed{A;B}", "AB"),
        (r"\boxed{A|B}", "AB"),
        (r"\boxed{B or maybe C}", "BC"),
        (r"\boxed{B (or C)}", "BC"),
        ("Answer: A B C D", "ABCD"),
        ("Answer: A. B. C. D.", "ABCD"),
        ("Answer: A, B, C, and D", "ABCD"),
        ("Answer: (A)(B)", "AB"),
        ("Answer: A + B", "AB"),
        ("Answer: either A or B", "AB"),
        ("The answer is A, but could also be B", "AB"),
        ("The answer is A and also B", "AB"),
        # letters that are named to deny them, and words that look like letters
        ("The answer is not A but B", "B"),
        ("Answer: not A, B", "B"),
        ("The answer cannot be A. It is C.", "C"),
        ("Answer: not A", ""),
        (r"\boxed{B. A dog}", "B"),
        ("Answer: B - A dog is one", "B"),
        ("Answer: I'd pick C", "C"),
        # which answer
        ("Answer: (B)\nThis answer is based on the text.", "B"),
        ("Is the answer A? No. Is the answer B? Yes.", "B"),
        ("The answer is B. A common wrong answer is A.", "B"),
        ("<answer>B</answer>", "B"),
        ("**Answer**\n\n**B**", "B"),
        (r"Answer: $\mathbf{B}$", "B"),
        (r"\boxed{\text{The answer is B}}", "B"),
        ("The correct option is C", "C"),
        ("I choose C", "C"),
        ("Option B is correct", "B"),
        ("答案：B", "B"),
        ("I have no idea", ""),
        ("I think so", ""),
        ("", ""),
        ("\ud800", ""),
    ],
)
def test_the_letter_that_an_answer_names(text: str, named: str) -> None:
    assert letters(text, OPTIONS) == set(named)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("It is 12", "A"),
        ("It is 12.", "A"),
        ("It is 12.5", ""),
        ("It is -12", ""),
        ("It is 1,412", ""),
        ("It is 12%", ""),
        ("It is 120", "B"),
        ("It is not 12, it is 120", "B"),
        (r"\boxed{12 \text{ or } 120}", "AB"),
    ],
)
def test_an_option_that_is_a_number_is_in_no_other_number(text: str, named: str) -> None:
    assert letters(text, ["12", "120"]) == set(named)


def test_one_letter_is_compared_several_are_ambiguous_and_none_is_no_answer() -> None:
    def verdict(text: str, finish_reason: str = "stop") -> tuple[float | None, str]:
        finding = TEXTS.verify(row("B"), {"text": text, "finish_reason": finish_reason})
        return finding.parts["choice"], finding.wrong

    assert verdict("Answer: B") == (1.0, "")
    assert verdict("Answer: C") == (0.0, "wrong_answer")
    assert verdict("Answer: B or C") == (0.0, "ambiguous")
    assert verdict("Answer:") == (0.0, "no_answer")
    assert verdict("Answer: B", "length") == (0.0, "cut_off")


@pytest.mark.parametrize("answer", ["B", " b ", "(B)", "B.", 1, "two cats", " Two  Cats"])
def test_what_is_right_is_a_letter_a_position_or_the_text_of_an_option(answer: object) -> None:
    TEXTS.check(row(answer))
    assert TEXTS.verify(row(answer), {"text": r"\boxed{B}", "finish_reason": "stop"}).parts == {"choice": 1.0}


@pytest.mark.parametrize(
    ("answer", "options"),
    [
        *((answer, OPTIONS) for answer in ("E", 4, -1, True, None, "", "three")),
        *(("A", options) for options in (["x"], None, "xy", ["x"] * 27)),
        ("x", ["x", "x"]),
    ],
)
def test_a_row_without_one_right_letter_is_named(answer: object, options: object) -> None:
    with pytest.raises(BadRow, match="row 7: "):
        TEXTS.check(row(answer, options))


def test_without_a_column_the_letters_are_a_to_d() -> None:
    LETTERS.check({"id": "7", "answer": "D", "info": {}})
    with pytest.raises(BadRow, match="a letter out of ABCD"):
        LETTERS.check({"id": "7", "answer": "E", "info": {}})


@pytest.mark.parametrize("unit", ["\n", " ", "answer ", "(", "**", "A", "A, ", r"\boxed{"])
def test_long_answers_are_read_in_no_time(unit: str) -> None:
    assert letters(unit * (200_000 // len(unit)), OPTIONS) <= set("ABCD")


@given(st.text(alphabet="ABab ()*.:,\n\\{}", max_size=30), st.lists(st.text(max_size=5), min_size=2, max_size=5))
def test_only_letters_that_there_are_are_named_and_nothing_raises(text: str, options: list[str]) -> None:
    for around in ("{}", r"\boxed{{{}}}", "Answer: {}"):
        assert letters(around.format(text), options) <= set("ABCDE"[: len(options)])
