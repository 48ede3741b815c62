"""From turns to rows: what was sampled is trained where it was sampled, once."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.collectors.engines.base import Completion, Sampling, Span
from asyncrl.collectors.episode import Episode, Played, Turn
from asyncrl.collectors.rollout import Prompt
from asyncrl.collectors.segments import chains, trajectories
from asyncrl.rewards.scoring import Score
from asyncrl.schema import Support
from asyncrl.staleness import Weights
from asyncrl.tasks.base import Row

EPISODE = Episode(
    Prompt(Row("r", "p"), (1, 2), "t"), "3.0", "run/0", ordinal=3, attempt=0, member=1, sampling=Sampling()
)
ONE = Score({"exact": 1.0}, 1.0, "")


def turn(number: int, asked: tuple[int, ...], answer: tuple[int, ...], *, version: int = 0, reward=None) -> Turn:
    count = len(answer)
    spans = (Span(Weights(1, version), 0, count, "aa"),) if count else ()
    completion = Completion(
        np.array(answer, np.int32),
        np.full(count, -0.25, np.float32),
        np.full(count, version, np.int32),
        spans,
        "stop",
        first_token=10.0 + number,
        done=11.0 + number,
    )
    return Turn(EPISODE.request(number, asked), completion, reward)


def rows(*turns: Turn, score: Score = ONE):
    return trajectories(Played(turns, score, 99.0, "stop", {"note": "n"}))


def test_a_turn_that_goes_on_is_in_the_same_row_and_what_stands_between_is_not_trained():
    (row,) = rows(turn(0, (1, 2), (5, 6)), turn(1, (1, 2, 5, 6, 7, 8), (9,), version=1))
    assert row.token_ids.tolist() == [1, 2, 5, 6, 7, 8, 9]
    assert row.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 1]
    assert row.versions.tolist() == [-1, -1, 0, 0, -1, -1, 1]
    assert row.logprobs.tolist() == [0, 0, -0.25, -0.25, 0, 0, -0.25]
    assert (row.prompt_length, row.turn_offsets, row.turn_rewards, row.segment) == (2, (2, 6), (), 0)
    assert [(span.start, span.end, span.weights.version) for span in row.spans] == [(2, 4, 0), (6, 7, 1)]
    assert (row.first_token, row.done, row.member, row.info) == (10.0, 12.0, 1, {"note": "n"})


def test_a_rewritten_history_begins_a_row_of_its_own_with_the_same_reward():
    first, second = rows(turn(0, (1, 2), (5, 6)), turn(1, (1, 2, 4, 7), (9,)))
    assert (first.token_ids.tolist(), second.token_ids.tolist()) == ([1, 2, 5, 6], [1, 2, 4, 7, 9])
    assert (first.segment, second.segment, second.prompt_length) == (0, 1, 4)
    assert first.reward == second.reward == 1.0
    assert first.seed != second.seed


def test_the_sampling_masks_of_turns_stand_where_their_tokens_are():
    one, two = turn(0, (1, 2), (5, 6)), turn(1, (1, 2, 5, 6, 7, 8), (9,))
    masked = replace(two, completion=replace(two.completion, support=Support.of([(4, 9)])))
    (row,) = rows(one, masked)
    assert row.support.counts.tolist() == [0, 0, 0, 0, 0, 0, 2]
    assert row.support.ids.tolist() == [4, 9]
    assert rows(one, two)[0].support is None


def test_two_answers_to_the_same_history_are_two_rows():
    first, second = rows(turn(0, (1, 2), (5,)), turn(1, (1, 2), (6,)))
    assert (first.token_ids.tolist(), second.token_ids.tolist()) == ([1, 2, 5], [1, 2, 6])


def test_a_branch_goes_on_with_the_row_it_continues():
    """Two conversations beside each other, as an agent with a helper of its own has them."""
    made = rows(turn(0, (1,), (5,)), turn(1, (2,), (6,)), turn(2, (1, 5, 7), (8,)), turn(3, (2, 6, 7), (9,)))
    assert [row.token_ids.tolist() for row in made] == [[1, 5, 7, 8], [2, 6, 7, 9]]


def test_rewards_of_turns_stand_where_the_turns_are():
    (row,) = rows(turn(0, (1, 2), (5,), reward=0.5), turn(1, (1, 2, 5, 7), (9,)))
    assert row.turn_rewards == (0.5, 0.0)


def test_what_success_is_measured_by_goes_with_every_row():
    made = rows(turn(0, (1, 2), (5,)), turn(1, (3,), (6,)), score=Score({"exact": 1.0}, 0.5, "", plain=1.0))
    assert [row.info["outcome"] for row in made] == [1.0, 1.0]
    unscored = rows(turn(0, (1, 2), (5,)), score=Score({}, math.nan, "verifier_nan"))
    assert (unscored[0].failure, "outcome" in unscored[0].info) == ("verifier_nan", False)


TOKENS = st.lists(st.integers(0, 2), max_size=4).map(tuple)


@given(st.lists(st.tuples(TOKENS.filter(len), TOKENS, st.booleans()), min_size=1, max_size=8))
def test_every_sampled_token_is_trained_once_after_the_tokens_it_was_sampled_after(script):
    """Whatever an agent does with its history. Turns that go on build on the newest sequence."""
    turns, newest = [], ()
    for number, (more, answer, goes_on) in enumerate(script):
        asked = (*newest, *more) if goes_on else more
        turns.append(turn(number, asked, answer))
        newest = (*asked, *answer)
    found = []
    for row, chain in zip(rows(*turns), chains(turns), strict=True):
        ids = row.token_ids.tolist()
        assert int(row.loss_mask.sum()) == sum(len(t.completion.token_ids) for t in chain)
        for one, start in zip(chain, row.turn_offsets, strict=True):
            assert tuple(ids[:start]) == one.request.token_ids
            end = start + len(one.completion.token_ids)
            assert ids[start:end] == one.completion.token_ids.tolist()
            assert row.loss_mask[start:end].all()
            found.append(one)
    assert sorted(found, key=lambda t: t.completion.done) == turns
