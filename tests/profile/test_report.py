"""The numbers of a profile, against enumeration and by what must hold for any answers."""

from __future__ import annotations

import json
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.rewards import Declared
from asyncrl.runtime.profile_report import Setting, different, repetition, report

NUMBER = st.floats(-10, 10, allow_nan=False)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.0, 0.0, 1.0], [0.0, 0.5, 1.0, 0.5, 0.5], [1.0] * 5])
def test_of_enough_answers_the_share_of_mixed_groups_is_counted(rewards, size):
    groups = list(combinations(rewards, size))
    assert different(rewards, size) == pytest.approx(sum(len(set(group)) > 1 for group in groups) / len(groups))


@pytest.mark.parametrize(("passed", "of", "size"), [(1, 4, 8), (2, 4, 5), (0, 4, 8), (4, 4, 8)])
def test_of_fewer_it_is_the_formula_of_the_pass_rate(passed, of, size):
    p = passed / of
    rewards = [1.0] * passed + [0.0] * (of - passed)
    assert different(rewards, size) == pytest.approx(1 - p**size - (1 - p) ** size)
    if 0 < p < 1:
        draws = [len(set(draw)) > 1 for draw in product(rewards, repeat=size)] if of**size < 2000 else None
        assert draws is None or sum(draws) / len(draws) == pytest.approx(different(rewards, size))


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=12), st.integers(2, 12))
def test_it_is_a_probability_and_larger_groups_differ_more_often(rewards, size):
    share = different(rewards, size)
    assert 0 <= share <= 1
    if size < len(rewards):
        assert different(rewards, size + 1) >= share - 1e-9
    assert (share == 0) == (len(set(rewards)) == 1)


def test_an_unscored_answer_is_in_no_pass_rate(entry, setting):
    answers = [entry("a", 1.0), entry("a", 0.0), entry("a", None, parts={}, detail="it raised"), entry("b", 0.0)]
    found = report(answers, setting(), seconds=1.0)
    assert (found["prompts"], found["answers"], found["unscored"], found["passed"]) == (2, 4, 1, 1)
    assert found["pass"]["value"] == 0.25
    assert found["pass_rate"] == [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert (found["failures"], found["details"]) == ({"verifier_raised": 1}, {"verifier_raised": "it raised"})
    assert found["zero_variance"] == 0.5


def test_an_answer_passes_above_the_bound_and_not_at_it(entry, setting):
    answers = [entry("a", 0.5), entry("a", 0.6)]
    found = report(answers, setting(pass_above=0.5), seconds=1.0)
    assert (found["passed"], found["reward"]["best"]) == (1, 0.5)


def test_rewards_that_differ_by_rounding_are_equal(entry, setting):
    found = report([entry("a", 0.1 + 0.2), entry("a", 0.3), entry("a", 0.3)], setting(group_size=2), seconds=1.0)
    assert (found["gradient"], found["zero_variance"], found["reward"]["best"]) == (0.0, 1.0, 1.0)
    found = report([entry("a", 0.31), entry("a", 0.3), entry("a", 0.3)], setting(group_size=3), seconds=1.0)
    assert (found["gradient"], found["zero_variance"]) == (1.0, 0.0), "the control"


def test_a_verifier_that_was_killed_has_no_time(entry, setting):
    answers = [entry("a", 1.0), entry("a", None, parts={}, failure="verifier_timeout", verifier_s=None)]
    found = report(answers, setting(), seconds=1.0)
    assert found["verifier_s"] == {"mean": 0.001, "p95": 0.001, "max": 0.001}
    assert found["speed"]["scoring_share"] == 0.001
    killed = report(answers[1:], setting(), seconds=1.0)
    json.dumps(killed, allow_nan=False)
    assert killed["verifier_s"] == {"mean": None, "p95": None, "max": None}


def test_without_any_score_there_are_no_numbers_and_no_nan(entry, setting):
    answers = [entry("a", None, parts={}, tokens=0, answer="", finish_reason="")]
    found = report(answers, setting(fresh_only=True), seconds=0.0)
    json.dumps(found, allow_nan=False)
    assert found["pass"]["value"] is found["gradient"] is found["truncated"] is found["tokens"]["mean"] is None
    assert found["parts"] == {}
    assert found["speed"]["tokens_per_s"] is found["speed"]["steps_per_hour"] is None


@given(
    st.lists(st.tuples(NUMBER, NUMBER), min_size=1, max_size=20),
    st.floats(-3, 3, allow_nan=False),
)
def test_the_shares_of_the_parts_add_up_to_the_variance(values, weight):
    answers = [
        {"task": "t", "row_id": "1", "reward": a, "parts": {"a": a, "b": b}, "tokens": 1, "answer": "x", "detail": "",
         "failure": "", "wrong": "", "finish_reason": "stop", "verifier_s": 0.0}
        for a, b in values
    ]  # fmt: skip
    setting = Setting(
        group_size=4, groups_per_step=2, pass_above=0.0, seed=0, parts={"b": Declared(weight, "constraint")}
    )
    parts = report(answers, setting, seconds=1.0)["parts"]
    assert (parts["a"]["weight"], parts["b"]["weight"], parts["b"]["role"]) == (1.0, weight, "constraint")
    shares = [parts["a"]["share"], parts["b"]["share"]]
    assert shares == [None, None] or sum(shares) == pytest.approx(1.0, abs=1e-6)


def test_a_part_that_never_changes_has_no_share_and_one_alone_has_all(entry, setting):
    answers = [entry("a", reward, parts={"exact": reward, "format": 1.0}) for reward in (0.0, 1.0)]
    parts = report(answers, setting(), seconds=1.0)["parts"]
    assert (parts["exact"]["share"], parts["format"]["share"]) == (1.0, 0.0)
    alike = [entry("a", 0.3, parts={"x": 0.1, "y": 0.2})] * 3  # whose sum is not quite 0.3
    assert report(alike, setting(), seconds=1.0)["parts"]["x"]["share"] is None


def test_parts_of_a_mixture_are_told_apart_by_their_tasks(entry, setting):
    answers = [entry("a", 1.0, task="maths"), entry("b", 0.0, task="code", parts={"tests": 0.0})]
    declared = {"maths/exact": Declared(0.5, "outcome")}
    parts = report(answers, setting(parts=declared, mixed=True), seconds=1.0)["parts"]
    assert {name: part["weight"] for name, part in parts.items()} == {"maths/exact": 0.5, "code/tests": 1.0}


def test_steps_an_hour_are_of_the_tokens_that_a_step_takes(entry, setting):
    """100 tokens a second, 10 an answer, 2 x 4 answers a step: 0.8 s. Leaving out half of the groups doubles it."""
    answers = [entry("a", 1.0, tokens=10)] * 2 + [entry("b", float(n), tokens=10) for n in range(2)]
    assert report(answers, setting(), seconds=0.4)["speed"]["steps_per_hour"] == pytest.approx(3600 / 0.8)
    left_out = setting(fresh_only=True, group_size=2)
    assert report(answers, left_out, seconds=0.4)["gradient"] == 0.5
    assert report(answers, left_out, seconds=0.4)["speed"]["steps_per_hour"] == pytest.approx(3600 / 0.8)


def test_scoring_is_shared_by_the_verifier_processes(entry, setting):
    answers = [entry("a", 1.0, verifier_s=1.0)] * 4
    assert report(answers, setting(score_workers=2), seconds=4.0)["speed"]["scoring_share"] == 0.5


def test_a_loop_is_repetition_and_ordinary_text_is_not():
    assert repetition("the answer is " * 50) > 0.9
    assert repetition("to reverse a string of digits one writes its last digit first and goes on to the left") == 0.0


def test_old_entries_keep_their_class_under_failure(entry, setting):
    assert report([entry("a", 0.0, failure="wrong_answer")], setting(), seconds=1.0)["wrong"] == {"wrong_answer": 1}
