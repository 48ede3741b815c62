"""What a profile says to do, case by case, and that it leads somewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.runtime import profile_verdict
from asyncrl.runtime.profile_verdict import NOT_YET, TEXTS, TOO_EASY, TRAIN, VERIFIER_FIRST, verdict
from tests.project.test_docs import headings

ROOT = Path(__file__).parents[2]


def numbers(passed=20, answers=64, gradient=0.7, **changes):
    """A report in which nothing is odd but what is changed."""
    rate = passed / answers
    report = {
        "answers": answers,
        "unscored": 0,
        "failures": {},
        "details": {},
        "passed": passed,
        "wrong": {},
        "group_size": 8,
        "pass": {"value": rate, "low": max(0.0, rate - 0.1), "high": min(1.0, rate + 0.1)},
        "gradient": gradient,
        "reward": {"best": rate},
        "zero_variance": 0.3,
        "truncated": 0.0,
        "repetition": 0.0,
        "parts": {"exact": {"role": "outcome", "share": 1.0}},
        "speed": {"scoring_share": 0.1},
    }
    return {**report, **changes}


def agreed(judged=60, kappa=0.9, high=1.0, false=0, of=20):
    return {
        "judged": judged,
        "kappa": {"value": kappa, "low": 0.0, "high": high},
        "false_passes": {"count": false, "of": of, "share": false / of if of else None},
    }


UNSCORED = {"unscored": 4, "failures": {"verifier_timeout": 4}, "details": {"verifier_timeout": "over 2 s"}}
NOTHING = {
    "unscored": 64,
    "pass": {"value": None, "low": None, "high": None},
    "gradient": None,
    "reward": {"best": None},
    "zero_variance": None,
}


CASES = [
        (numbers(), None, TRAIN, ["gradient"]),
        (numbers(), agreed(), TRAIN, ["gradient"]),
        (numbers(**UNSCORED), None, VERIFIER_FIRST, ["unscored"]),
        (numbers(**{**UNSCORED, "unscored": 3, "failures": {"verifier_timeout": 3}}), None, TRAIN, ["gradient"]),
        (numbers(0, **{**UNSCORED, **NOTHING}), None, VERIFIER_FIRST, ["unscored"]),
        (numbers(), agreed(kappa=0.4), VERIFIER_FIRST, ["kappa"]),
        (numbers(), agreed(judged=10, kappa=0.4), TRAIN, ["gradient"]),
        (numbers(), agreed(judged=10, kappa=0.1, high=None), TRAIN, ["gradient"]),
        (numbers(), agreed(judged=10, kappa=0.1, high=0.5), VERIFIER_FIRST, ["kappa"]),
        (numbers(), agreed(false=5), VERIFIER_FIRST, ["false_passes"]),
        (numbers(), agreed(kappa=None, false=0, of=0), TRAIN, ["gradient"]),
        (numbers(0, gradient=0.0), None, NOT_YET, ["pass"]),
        (numbers(0, gradient=0.9), None, NOT_YET, ["pass"]),
        (numbers(2, gradient=0.05), None, NOT_YET, ["gradient"]),
        (numbers(2, gradient=0.2), None, TRAIN, ["gradient"]),
        (numbers(64, gradient=0.0), None, TOO_EASY, ["pass"]),
        (numbers(61, gradient=0.5), None, TOO_EASY, ["pass"]),
        (numbers(58, gradient=0.05), None, TOO_EASY, ["gradient"]),
    (numbers(64, gradient=0.9, reward={"best": 0.2}), None, TRAIN, ["gradient"]),
        (numbers(0, **UNSCORED, gradient=0.0), None, VERIFIER_FIRST, ["unscored"]),
]  # fmt: skip


@pytest.mark.parametrize(("report", "agreement", "said", "decided"), CASES)
def test_the_verdict_is_the_first_thing_to_do(report, agreement, said, decided):
    found = verdict(report, agreement)
    assert (found["verdict"], found["text"]) == (said, TEXTS[said])
    assert [reason["name"] for reason in found["reasons"] if reason["decides"]] == decided


ODD = [
    ({}, []),
    ({"zero_variance": 0.6}, ["zero_variance"]),
    ({"truncated": 0.11}, ["truncated"]),
    ({"repetition": None}, []),
    ({"repetition": 0.5}, ["repetition"]),
    ({"speed": {"scoring_share": 0.8}}, ["scoring"]),
    ({"pass": {"value": 0.3, "low": 0.05, "high": 0.6}}, ["interval"]),
    ({"pass": {"value": 0.04, "low": 0.0, "high": 0.1}}, ["pass"]),
    ({"pass": {"value": 0.85, "low": 0.8, "high": 0.9}}, ["pass"]),
    ({"parts": {"length": {"role": "constraint", "share": 0.7}, "exact": {"role": "outcome", "share": 0.3}}}, ["part"]),
    ({"parts": {"format": {"role": "constraint", "share": None}}}, []),
    ({"unscored": 1, "failures": {"bad_row": 1}, "details": {"bad_row": ""}}, ["unscored"]),
]


@pytest.mark.parametrize(("changes", "warned"), ODD)
def test_what_is_odd_is_a_warning_and_no_verdict(changes, warned):
    found = verdict(numbers(**changes))
    assert found["verdict"] == TRAIN
    assert [reason["name"] for reason in found["reasons"] if not reason["decides"]] == warned


def test_where_nothing_passes_it_says_what_is_wrong_most_often():
    (reason,) = verdict(numbers(0, gradient=0.0, wrong={"malformed": 60, "wrong_tool": 4}))["reasons"]
    assert reason["text"] == (
        "none of 64 scored answers passes, so on these prompts likely fewer than 5% do; most often they are malformed "
        "(60)"
    )


def test_warnings_are_said_whatever_the_verdict():
    found = verdict(numbers(0, gradient=0.0, truncated=1.0))
    assert found["verdict"] == NOT_YET
    assert [reason["name"] for reason in found["reasons"]] == ["pass", "truncated"]


@given(
    st.integers(0, 64),
    st.integers(0, 20),
    st.floats(0, 1),
    st.one_of(st.none(), st.builds(agreed, st.integers(1, 64), st.floats(-1, 1), st.floats(-1, 1), st.integers(0, 5))),
)
def test_there_is_always_one_verdict_with_its_number_its_limit_and_where_to_read_on(
    passed, unscored, gradient, agreement
):
    failures = {"failures": {"bad_row": unscored}, "details": {"bad_row": "?"}, "unscored": unscored}
    found = verdict(numbers(min(passed, 64 - unscored), gradient=gradient, **failures), agreement)
    assert found["verdict"] in TEXTS
    assert any(reason["decides"] for reason in found["reasons"])
    for reason in found["reasons"]:
        assert isinstance(reason["value"], float | int)
        assert isinstance(reason["limit"], float | int)
        assert reason["text"]


def test_every_section_that_is_pointed_to_exists():
    found = [verdict(report, agreement) for report, agreement, *_ in CASES] + [
        verdict(numbers(**odd)) for odd, _ in ODD
    ]
    sections = {reason["see"].partition("#")[2] for one in found for reason in one["reasons"]}
    assert len(sections) == 10
    assert sections <= headings(ROOT / profile_verdict.PAGE)
