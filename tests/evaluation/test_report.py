"""What is counted, what is left out, and how two evaluations are paired."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.collectors.evaluation.compared import comparison
from asyncrl.collectors.evaluation.report import key_of, prompt_metrics, report
from asyncrl.config.evaluation import REWARD


def answer(row: str, reward: float | None, failure: str = "", finish: str = "stop", **more: Any) -> dict[str, Any]:
    return {"row_id": row, "reward": reward, "failure": failure, "finish_reason": finish, **more}


def of_rows(values: dict[tuple[str, str], float]) -> dict[str, float]:
    return {row: value for (_, row), value in values.items()}


ANSWERS = [
    *(answer("a", reward) for reward in (1.0, 1.0, 0.0, 0.0)),
    *(answer("b", reward) for reward in (0.5, 0.0, 0.0)),
    answer("b", None, "verifier_timeout"),
    *(answer("c", None, "row_error") for _ in range(4)),
]


def test_an_unscored_answer_is_unknown_and_not_wrong() -> None:
    metrics = prompt_metrics(ANSWERS, ks=[1, 2, 4], pass_above=0.0)
    assert of_rows(metrics["reward"]) == {"a": 0.5, "b": pytest.approx(0.5 / 3)}
    assert of_rows(metrics["pass@1"]) == {"a": 0.5, "b": pytest.approx(1 / 3)}
    assert of_rows(metrics["pass@2"]) == {"a": pytest.approx(5 / 6), "b": pytest.approx(2 / 3)}


def test_a_prompt_with_too_few_scored_answers_is_left_out_of_that_k_alone() -> None:
    found = report(ANSWERS, ks=[2, 4], samples=4, pass_above=0.0, seed=0)
    assert found["metrics"]["pass@2"]["prompts"] == 2
    assert found["metrics"]["pass@4"]["prompts"] == 1
    assert found["prompts"] == 3


def test_what_passes_is_said_by_the_threshold() -> None:
    assert of_rows(prompt_metrics(ANSWERS, ks=[1], pass_above=0.5)["pass@1"]) == {"a": 0.5, "b": 0.0}


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
    assert paired["low"] == pytest.approx(0.1, abs=0.011)
    assert paired["high"] == pytest.approx(0.1)


def test_a_majority_is_of_what_was_read_and_of_all_answers() -> None:
    def votes(row: str, *read: str, right: str = "12", lost: int = 0) -> list[dict[str, Any]]:
        scored = [answer(row, float(one == right), answer=f"so it is {one}", read=one) for one in read]
        return [*scored, *(answer(row, None, "verifier_timeout") for _ in range(lost))]

    answers = [
        *votes("right", "12", "12", "7"),
        *votes("wrong", "7", "7", "12"),
        *votes("tie", "1", "2", "12"),
        *votes("lost one", "12", "12", lost=1),
    ]
    found = of_rows(prompt_metrics(answers, ks=[1], pass_above=0.0)["majority@3"])
    assert found == {"right": 1.0, "wrong": 0.0, "tie": pytest.approx(1 / 3)}
    texts = [{**one, "read": ""} for one in answers]
    assert of_rows(prompt_metrics(texts, ks=[1], pass_above=0.0)["majority@3"]) == found, "texts are the readings"
    assert not any(name.startswith("majority") for name in prompt_metrics(answers[:2], ks=[1], pass_above=0.0))


def test_parts_classes_and_tokens_are_metrics_of_their_own() -> None:
    answers = [
        answer("a", 1.0, parts={"exact": 1.0, "unsafe": 0.0}, wrong="", tokens=10),
        answer("a", 0.0, parts={"exact": 0.0, "unsafe": -1.0}, wrong="unsafe", tokens=30, finish="length"),
        answer("b", 0.0, parts={"exact": 0.0, "unsafe": 0.0}, wrong="wrong_answer", tokens=20),
        answer("b", None, "verifier_nan", parts={"exact": None, "unsafe": 0.0}, wrong="", tokens=100),
    ]
    found = report(answers, ks=[1], samples=2, pass_above=0.0, seed=0)
    values = {name: metric["value"] for name, metric in found["metrics"].items()}
    assert values == {
        "reward": 0.25,
        "pass@1": 0.25,
        "reward/exact": 0.25,
        "reward/unsafe": -0.25,
        "wrong/unsafe": 0.25,
        "wrong/wrong_answer": 0.5,
        "unscored": 0.25,
        "truncated": 0.25,
        "tokens": 40.0,
        "tokens_per_success": 60.0,  # of the scored ones
    }
    assert found["wrong"] == {"unsafe": 1, "wrong_answer": 1}
    assert found["solved"] == {"never": 1, "sometimes": 1, "always": 0}


def test_without_a_success_its_price_is_unknown_and_not_infinite() -> None:
    failed = [answer("a", 0.0, tokens=10), answer("b", 0.0, tokens=10)]
    assert report(failed, ks=[1], samples=1, pass_above=0.0, seed=0)["metrics"]["tokens_per_success"]["value"] is None
    once = [answer("a", 1.0, tokens=10), answer("b", 0.0, tokens=10)]
    price = report(once, ks=[1], samples=1, pass_above=0.0, seed=0)["metrics"]["tokens_per_success"]
    assert (price["value"], price["low"], price["high"]) == (20.0, None, None), "some resamples have no success"


def test_rows_of_two_tasks_may_have_the_same_id_and_tasks_have_numbers_of_their_own() -> None:
    answers = [answer("1", 1.0, task="maths"), answer("1", 0.0, task="code"), answer("2", 0.0, task="code")]
    found = report(answers, ks=[1], samples=1, pass_above=0.0, seed=0)
    assert found["prompts"] == 3
    assert {name: group["metrics"]["reward"]["value"] for name, group in found["by"]["task"].items()} == {
        "code": 0.0,
        "maths": 1.0,
    }
    assert "task" not in report(answers[1:], ks=[1], samples=1, pass_above=0.0, seed=0)["by"]


def test_difficulty_groups_prompts_in_the_order_of_its_values() -> None:
    answers = [answer(str(n), float(n < 3), difficulty=(10, 2, 2, None)[n % 4]) for n in range(8)]
    found = report(answers, ks=[1], samples=1, pass_above=0.0, seed=0)["by"]["difficulty"]
    assert [(name, group["prompts"]) for name, group in found.items()] == [("2", 4), ("10", 2), ("unknown", 2)]
    assert found["2"]["metrics"]["reward"]["value"] == 0.5


def test_what_changed_is_listed_by_class_and_by_prompt() -> None:
    ours = [answer("a", 1.0, wrong="", answer="12"), answer("b", 0.0, wrong="cut_off"), answer("c", 1.0, wrong="")]
    theirs = [answer("a", 0.0, wrong="malformed", answer="x"), answer("b", 1.0, wrong=""), answer("c", 1.0, wrong="")]
    found = comparison(ours, theirs, ks=[1], pass_above=0.0, seed=0)
    assert {(one["from"], one["to"]): one["answers"] for one in found["changes"]} == {
        ("malformed", "right"): 1,
        ("right", "cut_off"): 1,
        ("right", "right"): 1,
    }
    assert [row["row_id"] for row in found["better"]] == ["a"]
    assert [row["row_id"] for row in found["worse"]] == ["b"]
    assert (found["better"][0]["answers"][0]["answer"], found["better"][0]["against"][0]["answer"]) == ("12", "x")
    assert found["metrics"]["wrong/malformed"]["better"] == 1, "less of a class is better, also of one that is gone"
    assert found["metrics"]["wrong/cut_off"]["worse"] == 1
    assert {name: group["prompts"] for name, group in found["by"]["before"].items()} == {"never": 1, "always": 2}


def test_an_older_document_has_what_it_can_have() -> None:
    old = [answer("a", 0.0, "wrong_answer"), answer("b", 1.0)]
    found = report(old, ks=[1], samples=1, pass_above=0.0, seed=0)
    assert found["wrong"] == {"wrong_answer": 1}
    assert (found["failures"], found["latency_s"]) == ({}, None)
    assert "tokens_per_success" not in found["metrics"]
    assert found["metrics"][REWARD]["value"] == 0.5
    assert key_of(old[0]) == ("", "a")
