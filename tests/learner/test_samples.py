"""Answers of a step that are shown while a run trains."""

from __future__ import annotations

import math

import pytest

from asyncrl.config.recipe import PrintCompletions
from asyncrl.learners.samples import ANSWER_CHARACTERS, PROMPT_CHARACTERS, samples
from asyncrl.schema import pack, to_batch
from asyncrl.telemetry.text import event_line


def decode(ids) -> str:
    return "".join(chr(96 + i) for i in ids)


@pytest.fixture
def packed(make_row, make_group):
    rewards = [0.5, 1.0, math.nan, -1.0, 0.0]
    rows = [
        make_row([1], [n + 1] * 3, [-1.0] * 3, reward=reward, member=n, failure="" if reward >= 0 else "malformed")
        for n, reward in enumerate(rewards)
    ]
    return pack([to_batch(make_group(rows))])


@pytest.mark.parametrize(
    ("n", "rewards"), [(1, [-1.0]), (2, [-1.0, 1.0]), (3, [-1.0, 0.5, 1.0]), (9, [-1.0, 0.0, 0.5, 1.0])]
)
def test_they_go_from_the_least_reward_to_the_greatest_and_unscored_ones_are_not_among_them(packed, n, rewards) -> None:
    found = samples(packed, PrintCompletions(n=n), decode)
    assert [sample["reward"] for sample in found] == rewards
    assert (found[0]["wrong"], found[0]["answer"], found[0]["prompt"], found[0]["tokens"]) == (
        "malformed",
        "ddd",
        "a",
        3,
    )


def test_a_step_in_which_nothing_is_scored_shows_none(make_row, make_group) -> None:
    row = make_row([1], [2], [-1.0], reward=math.nan, failure="verifier_timeout")
    assert samples(pack([to_batch(make_group([row]))]), PrintCompletions(), decode) == []


def test_long_ones_are_cut_at_the_prompts_beginning_and_the_answers_end(make_row, make_group) -> None:
    row = make_row([1] * 2000 + [2], [3] * 5000 + [4], [-1.0] * 5001, reward=1.0)
    (sample,) = samples(pack([to_batch(make_group([row]))]), PrintCompletions(), decode)
    assert len(sample["prompt"]) == PROMPT_CHARACTERS
    assert sample["prompt"].endswith("ab")
    assert len(sample["answer"]) == ANSWER_CHARACTERS
    assert sample["answer"].startswith("ccc")


def test_what_a_model_wrote_does_not_move_the_cursor() -> None:
    sample = {"row_id": "f:1", "prompt": "\x1b[2Jwhat", "answer": "one\ntwo\x07", "reward": 1.0, "wrong": ""}
    shown = event_line({"event": "samples", "version": 7, "samples": [sample]})
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert shown.splitlines()[0] == "answers of step 7:"
    assert shown.splitlines()[-2:] == ["    answered  one", "              two\\x07"]
