"""What of a batch is trained, and how it is split."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.learners.advantages import advantages
from asyncrl.learners.batch import BoundBroken, check_ages, check_lineages, make_batch, microbatches, split_rows
from asyncrl.learners.diagnostics import group_metrics
from asyncrl.learners.layout import shared_prefixes
from asyncrl.schema import Trajectory, VersionSpan, pack, to_batch
from asyncrl.staleness import Lineages, Weights


@given(lengths=st.lists(st.integers(1, 50), max_size=40), budget=st.integers(1, 80))
def test_split_rows_takes_each_row_once_in_order_and_keeps_the_budget(lengths: list[int], budget: int) -> None:
    portions = split_rows(lengths, budget)
    assert [row for portion in portions for row in portion] == list(range(len(lengths)))
    assert all(portions)
    for portion in portions:
        assert len(portion) == 1 or sum(lengths[row] for row in portion) <= budget
    for first, second in itertools.pairwise(portions):  # no portion could have taken the next row too
        assert sum(lengths[row] for row in first) + lengths[second[0]] > budget


def test_unscored_rows_and_non_finite_logprobs_are_left_out_and_counted(make_row, make_group) -> None:
    rows = [
        make_row([1, 2], [3, 4, 5], [-1.0, -2.0, -3.0], reward=1.0),
        make_row([1, 2], [6], [-1.0], reward=math.nan, member=1, failure="verifier_nan"),
        make_row([1, 2], [7, 8], [-math.inf, -0.5], reward=0.0, member=2),
        make_row([1, 2], [9, 9], [math.nan, -0.5], reward=0.0, member=3),
    ]
    packed = pack([to_batch(make_group(rows))])
    batch = make_batch(packed, version=2, max_age=2)
    assert batch.tokens == 5
    assert batch.nonfinite == 2
    assert batch.ages[batch.trained].tolist() == [2] * 5
    assert batch.ages[~batch.trained].tolist() == [-1] * (len(batch.ages) - 5)
    assert batch.behaviour.isfinite().all()
    positions = np.concatenate([micro.positions.numpy() for micro in microbatches(batch, np.ones(4, bool), 4)])
    assert sorted(positions.tolist()) == [*range(5), *range(8, 16)]  # the unscored row does not go through the model


def test_what_success_is_measured_by_is_the_reward_where_nothing_shapes_it(make_row, make_group) -> None:
    """`pass_rate` looks at it: a right answer whose penalty takes all of its reward is right."""
    rows = [make_row([1], [2], [-1.0], reward=reward, member=n) for n, reward in enumerate([0.0, 0.5, math.nan])]
    rows[0] = dataclasses.replace(rows[0], info={"outcome": 1.0})
    batch = make_batch(pack([to_batch(make_group(rows))]), version=0, max_age=0)
    np.testing.assert_array_equal(batch.outcomes, [1.0, 0.5, math.nan])
    worth = advantages(batch.rewards, batch.groups, "group-mean")
    assert group_metrics(batch, worth)["pass_rate"][10] == 1


@given(st.data())
def test_micro_batches_hold_every_trained_token_once_whatever_the_budget(make_row, make_group, data) -> None:
    rows: list[Trajectory] = []
    for member in range(data.draw(st.integers(1, 8))):
        p, c = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 6))
        reward = data.draw(st.sampled_from([0.0, 1.0, math.nan]))
        rows.append(make_row([1] * p, [2] * c, [-1.0] * c, reward=reward, member=member))
    batch = make_batch(pack([to_batch(make_group(rows))]), version=0, max_age=0)
    seen = np.zeros(len(batch.token_ids), int)
    half = np.array([data.draw(st.booleans()) for _ in rows])
    budget = data.draw(st.integers(1, 30))
    for micro in microbatches(batch, half, budget) + microbatches(batch, ~half, budget):
        np.add.at(seen, micro.positions.numpy(), 1)
        assert int(micro.cu_seqlens[-1]) == len(micro.positions)
    assert (seen[batch.trained.numpy()] == 1).all()
    assert seen.max(initial=0) <= 1


def test_members_that_answer_alike_are_neighbours(make_row, make_group) -> None:
    """Two answers in turn, in each of two groups: of twelve sequences of four tokens seven tokens are computed."""
    rows = [
        make_row([1, 2], answer, [-1.0, -1.0], reward=1.0, member=n) for n, answer in enumerate([[3, 4], [3, 5]] * 3)
    ]
    batch = make_batch(pack([to_batch(make_group(rows, ticket=n)) for n in range(2)]), version=0, max_age=0)
    (micro,) = microbatches(batch, np.ones(12, bool), 1000)
    places = shared_prefixes(batch.token_ids[micro.positions], [4] * 12)
    assert int(places.max()) + 1 == 5 + 2  # 1 2 3 4 and 5; of the second group, which begins alike, 4 and 5
    assert batch.groups[micro.positions.numpy()[::4] // 4].tolist() == [0] * 6 + [1] * 6


@pytest.mark.parametrize(("versions", "why"), [([4, 2], "age 3"), ([6], "does not exist yet"), ([-1], "version -1")])
def test_tokens_beyond_the_bound_or_from_the_future_are_never_trained(versions: list[int], why: str) -> None:
    with pytest.raises(BoundBroken, match=why):
        check_ages(np.array(versions, np.int32), version=5, max_age=2)
    check_ages(np.array([3, 4, 5], np.int32), version=5, max_age=2)


def mixed_ages(make_row, make_group, *, unscored: bool = False):
    """One group at step 5: a row of versions 1, 2, 4 and one of version 5."""
    old = make_row([1], [2, 3, 4], [-1.0, -1.0, -1.0], reward=math.nan if unscored else 1.0)
    old.versions[1:] = [1, 2, 4]
    spans = tuple(VersionSpan(Weights(1, v), n, n + 1, "") for n, v in ((1, 1), (2, 2), (3, 4)))
    rows = [
        dataclasses.replace(old, spans=spans),
        make_row([1], [5], [-1.0], reward=0.0, weights=Weights(1, 5), member=1),
    ]
    return pack([to_batch(make_group(rows))])


def test_mask_leaves_out_the_tokens_beyond_the_bound_and_counts_them_by_age(make_row, make_group) -> None:
    packed = mixed_ages(make_row, make_group)
    batch = make_batch(packed, version=5, max_age=2, mask_older=True)
    assert batch.trained.tolist() == [False, False, False, True, False, True]
    assert batch.ages.tolist() == [-1, -1, -1, 1, -1, 0]
    assert batch.masked == {3: 1, 4: 1}
    assert batch.tokens == 2  # the denominator
    assert batch.rewards.tolist() == [1.0, 0.0]  # the baseline is that of the whole group
    assert make_batch(packed, version=5, max_age=4, mask_older=True).masked == {}
    of_unscored = make_batch(mixed_ages(make_row, make_group, unscored=True), version=5, max_age=2, mask_older=True)
    assert (of_unscored.masked, of_unscored.tokens) == ({}, 1)  # they were never to be trained


def test_without_the_mask_the_learners_own_check_refuses_the_same_tokens(make_row, make_group, monkeypatch) -> None:
    """Negative control: what `mask` lets through is checked as anywhere else."""
    packed = mixed_ages(make_row, make_group)
    with pytest.raises(BoundBroken, match="age 4"):
        make_batch(packed, version=5, max_age=2)
    monkeypatch.setattr("asyncrl.learners.batch.beyond", lambda versions, **_: np.zeros(len(versions), bool))
    with pytest.raises(BoundBroken, match="age 4"):
        make_batch(packed, version=5, max_age=2, mask_older=True)
    monkeypatch.undo()
    with pytest.raises(BoundBroken, match="does not exist yet"):
        make_batch(packed, version=4, max_age=2, mask_older=True)


@pytest.mark.parametrize("kind", ["group-mean-std", "group-mean", "leave-one-out"])
def test_what_a_row_is_worth_is_the_same_at_every_use(make_row, make_group, kind) -> None:
    packed = mixed_ages(make_row, make_group)
    batches = [make_batch(packed, version=version, max_age=2, mask_older=True) for version in (5, 6, 7)]
    worth = [advantages(batch.rewards, batch.groups, kind).values.tolist() for batch in batches]
    assert worth[0] == worth[1] == worth[2]
    assert [batch.tokens for batch in batches] == [2, 2, 1]
    assert [sum(batch.masked.values()) for batch in batches] == [2, 2, 3]


def test_tokens_of_a_rewound_branch_are_never_trained() -> None:
    tree = Lineages({1: (0, 0), 2: (1, 5)})
    check_lineages([Weights(1, 5), Weights(2, 7)], lineages=tree, current=2)
    with pytest.raises(BoundBroken, match=r"\(1, 6\), which were rewound"):
        check_lineages([Weights(1, 6)], lineages=tree, current=2)


def test_a_row_without_prompt_is_refused(make_row, make_group) -> None:
    packed = pack([to_batch(make_group([make_row([], [3, 4], [-1.0, -1.0], reward=1.0)]))])
    with pytest.raises(ValueError, match="row 0 of the batch has no prompt"):
        make_batch(packed, version=0, max_age=0)
