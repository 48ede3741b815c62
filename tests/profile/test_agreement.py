"""Verifier against person: the numbers of a table, and what must hold for any marks."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.runtime.profile_agreement import agreement, kappa


def answers_of(rewards, entry):
    return [entry(str(n // 2), reward) for n, reward in enumerate(rewards)]


def test_a_table_gives_its_numbers(entry):
    """20 + 15 of 50 agree; by chance 0.5 x 0.6 + 0.5 x 0.4 would: kappa 0.4 (the example of many textbooks)."""
    answers = answers_of([1.0] * 25 + [0.0] * 25, entry)
    right = [True] * 20 + [False] * 5 + [True] * 10 + [False] * 15
    found = agreement(answers, dict(enumerate(right, 1)), pass_above=0.0, seed=0)
    assert (found["judged"], found["unscored"]) == (50, 0)
    assert found["confusion"] == {"passes_right": 20, "passes_wrong": 5, "fails_right": 10, "fails_wrong": 15}
    assert found["accuracy"]["value"] == 0.7
    assert found["kappa"]["value"] == pytest.approx(0.4)
    assert found["kappa"]["low"] < 0.4 < found["kappa"]["high"]
    assert found["false_passes"] == {"count": 5, "of": 25, "share": 0.2, "outputs": [21, 22, 23, 24, 25]}
    assert found["false_failures"]["outputs"] == list(range(26, 36))


def test_an_answer_without_a_score_agrees_with_nobody(entry):
    found = agreement([entry("1", None), entry("1", 1.0)], {1: True, 2: True}, pass_above=0.0, seed=0)
    assert (found["judged"], found["unscored"]) == (1, 1)
    assert found["kappa"]["value"] is None
    assert found["accuracy"]["value"] == 1.0


def test_all_that_a_few_agree_on_is_not_certain(entry):
    """Of ten answers to five prompts no disagreement: neither is accuracy 1 beyond doubt, nor can a bootstrap say of
    kappa how far it may be otherwise."""
    answers = answers_of([1.0, 0.0] * 5, entry)
    found = agreement(answers, {n: n % 2 == 1 for n in range(1, 11)}, pass_above=0.0, seed=0)
    assert found["accuracy"]["value"] == found["kappa"]["value"] == 1.0
    assert 0.5 < found["accuracy"]["low"] < 0.6
    assert found["kappa"]["low"] is found["kappa"]["high"] is None


def test_a_kappa_of_one_prompt_decides_nothing_by_its_interval(entry):
    answers = [entry("1", float(n < 5)) for n in range(10)]
    found = agreement(answers, {n: n % 3 > 0 for n in range(1, 11)}, pass_above=0.0, seed=0)
    assert found["kappa"]["value"] < 0.6
    assert found["kappa"]["high"] is None


def test_nobody_agrees_on_nothing(entry):
    found = agreement([entry("1", None)], {1: True}, pass_above=0.0, seed=0)
    json.dumps(found, allow_nan=False)
    assert found["accuracy"]["value"] is found["kappa"]["value"] is found["false_passes"]["share"] is None


@settings(max_examples=30)  # each draws eight thousand resamples
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=30))
def test_the_numbers_stay_in_their_ranges_and_do_not_change_with_the_seed(pairs):
    answers = [{"task": "t", "row_id": str(n // 3), "reward": float(passes)} for n, (passes, _) in enumerate(pairs)]
    marks = {n: right for n, (_, right) in enumerate(pairs, 1)}
    one, other = (agreement(answers, marks, pass_above=0.5, seed=seed) for seed in (0, 1))
    json.dumps(one, allow_nan=False)
    for name in ("accuracy", "kappa"):
        assert one[name]["value"] == other[name]["value"]
        if one[name]["low"] is not None:
            assert -1.0 - 1e-9 <= one[name]["low"] <= one[name]["high"] <= 1.0 + 1e-9
    agreed = sum(passes == right for passes, right in pairs)
    assert one["accuracy"]["value"] == pytest.approx(agreed / len(pairs))
    if agreed == len(pairs):
        assert one["kappa"]["value"] in (None, 1.0)


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4))
def test_it_is_the_same_kappa_whichever_of_the_two_is_the_verifier(cells):
    passes_right, passes_wrong, fails_right, fails_wrong = cells
    one, other = kappa(np.array([cells, [passes_right, fails_right, passes_wrong, fails_wrong]]))
    assert one == pytest.approx(other, nan_ok=True)
