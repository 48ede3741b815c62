"""What is read from a judge's reply: a verdict that is clearly one, and nothing else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rewards.judge_reply import Unreadable, verdict

SCALE = (1.0, 10.0)


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("7", 7),
        ("Right, but it names no unit.\n\nScore: 7", 7),
        ("**7**", 7),
        ("Score: 7/10", 7),
        ("7 / 10.", 7),
        ("I would say `8.5`.\n", 8.5),
        ("It has 3 faults in 2 lines.\n4", 4),
        ("$\\boxed{9}$", 9),
        ("<think>10? no, 2</think>\n3", 3),
        ("<think>10? no, 2</think>3", 3),
        ("7 out of 10", 7),
        ("Score: **7** of 10.", 7),
        ("**7**/10", 7),
        ("Score (1-10): 7", 7),
        ("Rating: [[7]]", 7),
        ("The overall score is **7**.", 7),
        ("评分：7", 7),
        ("Feedback: it is right. [RESULT] 4", 4),
        ("It names 2 faults that there are not. So I would rate this answer a 7/10.", 7),
        ("I'd give it **8**", 8),
        ("This gets a score of 6.", 6),
    ],
)
def test_the_number_at_the_end_is_the_verdict(reply: str, number: float) -> None:
    assert verdict(reply, "number", SCALE) == pytest.approx((number - 1) / 9)


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "good",
        "7 of 10 people like it",
        "7 out of 5",
        "70 of 10",
        "7 (on a scale of 1 to 10)",
        "Rating: 3 (max 10).",
        "7 or 8",
        "Between 7 and 8",
        "7 – 8",
        "Score: 7 to 8",
        "7, not 10",
        "\\frac{7}{10}",
        "It is right, and yet this is not a 10",
        "I cannot give it a 10",
        "I can't, in good faith, give it a 10",
        "With a reason I would give it more than 8",
        "If it had a unit I'd give it a 9",
        "I give it a 7 or 8",
        "I would rate it 7, and the other 9",
        "2 + 2 = 4",
        "At 10:9",
        "<think>It is a\n7",
        "Between 7-8",
        "7,5",
        "Score: 7/5",
        "v10",
        "1e1",
        "0",
        "11",
        "-3",
        "12.10.10",
        "٣",
        "nan",
    ],
)
def test_what_is_no_number_of_the_scale_is_no_verdict(reply: str) -> None:
    with pytest.raises(Unreadable):
        verdict(reply, "number", SCALE)


def test_a_scale_may_have_negative_numbers() -> None:
    assert verdict("So: -3", "number", (-3, 3)) == 0.0
    assert verdict("So: -1.5", "number", (-3, 3)) == 0.25
    assert verdict("So: \N{MINUS SIGN}1.5", "number", (-3, 3)) == 0.25


@pytest.mark.parametrize(
    "reply",
    [
        '{"score": 5.5}',
        'I see {no} fault.\n```json\n{"reason": "a \\"brace\\" }", "score": 5.5}\n```',
        'A perfect one is {"score": 10}, but this:\n{"score": 5.5, "faults": [{"score": 1}]}',
    ],
)
def test_the_object_at_the_end_has_the_verdict(reply: str) -> None:
    assert verdict(reply, "json", SCALE) == 0.5


@pytest.mark.parametrize(
    "reply",
    [
        "5",
        '{"score": 5} is what I think',
        '{"score": 5, "score": 9}',
        '{"a": {"score": 10}, "score": 3, "score": 3}',
        '{"inner": {"score": 10}',
        '{broken {"score": 10}}',
        '{"score": NaN}',
        '{"score": true}',
        '{"score": "7"}',
        '{"verdict": 7}',
        '{"score": 70}',
        '{"score": 1' + "0" * 400 + "}",
        '<think>\n{"score": 7}',
        '{"score": null}',
        "{" * 20_000,
        '{"a":' * 20_000 + "1" + "}" * 20_000,
    ],
)
def test_any_other_object_is_no_verdict(reply: str) -> None:
    with pytest.raises(Unreadable):
        verdict(reply, "json", SCALE)


@given(st.text(max_size=300), st.sampled_from(["number", "json"]))
def test_no_reply_does_anything_but_score_or_be_unreadable(reply: str, form: str) -> None:
    try:
        value = verdict(reply, form, SCALE)  # type: ignore[arg-type]
    except Unreadable:
        return
    assert 0.0 <= value <= 1.0


@given(st.integers(1, 10), st.text(max_size=100))
def test_whatever_the_reason_says_the_verdict_behind_it_counts(score: int, reason: str) -> None:
    assert verdict(json.dumps({"reason": reason, "score": score}), "json", SCALE) == (score - 1) / 9
    assert verdict(f"{reason}\n{score}", "number", SCALE) == (score - 1) / 9
