"""What is counted, what is left out, and how two evaluations are paired."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.collectors.evaluation.report import comparison, prompt_metrics, report


def answer(row: str, reward: float | None, failure: str = "", finish: str = "stop") -> dict[str, Any]:
    return {"row_id": row, "reward": reward, "failure": failure, "finish_reason": finish}


ANSWERS = [
    *(answer("a", reward) for reward in (1.0, 1.0, 0.0, 0.0)),
    *(answer("b", reward) for reward in (0.5, 0.0, 0.0)),
    answer("b", None, "verifier_timeout"),
    *(answer("c", None, "row_error") for _ in range(4)),
]


def test_an_unscored_answer_is_unknown_and_not_wrong() -> None:
    metrics = prompt_metrics(ANSWERS, ks=[1, 2, 4], pass_above=0.0)
    assert metrics["reward"] == {"a": 0.5, "b": pytest.approx(0.5 / 3)}
    assert metrics["pass@1"] == {"a": 0.5, "b": pytest.approx(1 / 3)}
    assert metrics["pass@2"] == {"a": pytest.approx(5 / 6), "b": pytest.approx(2 / 3)}


def test_a_prompt_with_too_few_scored_answers_is_left_out_of_that_k_alone() -> None:
    found = report(ANSWERS, ks=[2, 4], samples=4, pass_above=0.0, seed=0)
    assert found["metrics"]["pass@2"]["prompts"] == 2
    assert found["metrics"]["pass@4"]["prompts"] == 1
    assert found["prompts"] == 3


def test_what_passes_is_said_by_the_threshold() -> None:
    assert prompt_metrics(ANSWERS, ks=[1], pass_above=0.5)["pass@1"] == {"a": 0.5, "b": 0.0}


def test_unscored_answers_are_counted_by_the_name_of_their_failure() -> None:
    found = report([*ANSWERS, answer("d", 0.0, finish="length")], ks=[1], samples=4, pass_above=0.0, seed=0)
    assert (found["answers"], found["unscored"], found["truncated"]) == (13, 5, 1)
    assert found["failures"] == {"row_error": 4, "verifier_timeout": 1}


def test_nothing_scored_gives_no_number_and_no_error() -> None:
    nothing = [answer("a", None, "verifier_error")]
    found = report(nothing, ks=[1], samples=1, pass_above=0.0, seed=0)
    assert found["metrics"]["reward"]["value"] is None
    assert comparison(nothing, ANSWERS, ks=[1], pass_above=0.0, seed=0)["metrics"]["pass@1"]["prompts"] == 0


def test_a_difference_is_taken_prompt_by_prompt_where_both_have_a_score() -> None:
    ours = [answer("a", 1.0), answer("b", 1.0), answer("c", 0.0), answer("d", 1.0)]
    theirs = [answer("c", 1.0), answer("b", 1.0), answer("a", 0.0), answer("d", None, "verifier_error")]
    found = comparison(ours, theirs, ks=[1], pass_above=0.0, seed=0)["metrics"]["pass@1"]
    assert found["value"] == 0.0
    assert (found["better"], found["equal"], found["worse"], found["prompts"]) == (1, 1, 1, 3)


def test_pairing_takes_out_what_makes_prompts_differ() -> None:
    """Every prompt is better by the same amount: the difference is certain, though each mean is not."""
    ours = [answer(str(n), n / 50 + 0.1) for n in range(50)]
    theirs = [answer(str(n), n / 50) for n in range(50)]
    alone = report(ours, ks=[], samples=1, pass_above=0.0, seed=0)["metrics"]["reward"]
    paired = comparison(ours, theirs, ks=[], pass_above=0.0, seed=0)["metrics"]["reward"]
    assert alone["high"] - alone["low"] > 0.1
    assert paired["low"] == pytest.approx(0.1)
    assert paired["high"] == pytest.approx(0.1)
