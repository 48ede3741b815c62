"""Metrics of a step against numbers by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from asyncrl.learners.advantages import advantages
from asyncrl.learners.batch import make_batch
from asyncrl.learners.diagnostics import continued, step_metrics, task_metrics
from asyncrl.learners.step import Seen
from asyncrl.schema import pack, to_batch
from asyncrl.staleness import Weights


def metrics(
    make_row,
    make_group,
    ratios: dict[int, float],
    first: int = 10,
    mismatches: dict[int, float] | None = None,
    reference: float | None = None,
) -> dict:
    """Two groups at step 3: one of version 3 (rewards 1 and 0), one of version 2 (unscored, alone). first: how many of
    the ten tokens the first update trains. mismatches: of the ages whose version was asked. reference: its log-probs,
    less the behaviour's."""
    rows = [
        [
            make_row([1], [2, 3], [-1.0, -1.0], reward=1.0, weights=Weights(1, 3)),
            make_row([1], [4], [-2.0], reward=0.0, weights=Weights(1, 3), member=1, finish="length"),
        ],
        [
            make_row([1], [5, 6], [-1.0, -1.0], reward=0.5, weights=Weights(1, 2)),
            make_row([1], [7], [-1.0], reward=math.nan, weights=Weights(1, 2), member=1, failure="verifier_timeout"),
        ],
    ]
    packed = pack([to_batch(make_group(r, ticket=n)) for n, r in enumerate(rows)])
    batch = make_batch(packed, version=3, max_age=1)
    log_ratio = np.zeros(len(batch.token_ids))
    for age, ratio in ratios.items():
        log_ratio[batch.ages.numpy() == age] = math.log(ratio)
    included = batch.trained.numpy()
    proximal = np.full(len(included), np.nan, np.float32)
    for age, mismatch in (mismatches or {}).items():
        at = batch.ages.numpy() == age
        proximal[at] = batch.behaviour.numpy()[at] + math.log(mismatch)
    seen = Seen(
        loss_sum=1.25,
        units=5,
        included=included,
        logprobs=np.where(included, batch.behaviour.numpy() + log_ratio, 0).astype(np.float32),
        ratio=np.where(included, np.exp(log_ratio), 0).astype(np.float32),
        clipped=included & (np.exp(log_ratio) > 1.28),
        masked=np.zeros(len(included), np.uint8),
        measured=included,
        pulls=included.astype(np.float32) * (1 + batch.ages.numpy()),
        cut=included & (proximal - batch.behaviour.numpy() > math.log(2)),
        entropy=included * np.float32(0.5),
        proximal=proximal,
        reference=np.full_like(proximal, np.nan) if reference is None else batch.behaviour.numpy() + reference,
        nonfinite=0,
    )
    worth = advantages(batch.rewards, batch.groups, "group-mean")
    return step_metrics(packed, batch, worth, seen, first=np.arange(first), update="keep")


def test_metrics_by_hand(make_row, make_group) -> None:
    found = metrics(make_row, make_group, {0: 1.0, 1: 2.0})
    assert found["reward/mean"] == 0.5
    assert found["reward_part/exact"] == 0.5
    assert (found["unscored"], found["failures"]) == (1, {"verifier_timeout": 1})
    assert (found["length/mean"], found["length/max"], found["truncated"]) == (1.5, 2, 0.25)
    assert found["pass_rate"] == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1]
    assert (found["groups"], found["zero_variance"], found["tokens"]) == (2, 0.5, 5)
    assert found["age/tokens"] == {"0": 3, "1": 2}
    assert (found["age/mean"], found["age/max"]) == (0.4, 1)
    assert found["ratio/mean"] == pytest.approx(7 / 5)
    assert found["ess"] == pytest.approx(7**2 / (5 * 11))
    assert found["ess/sequence"] == pytest.approx((1 + 1 + 4) ** 2 / (3 * (1 + 1 + 16)))  # two tokens of ratio 2
    assert found["kl"] == pytest.approx(2 * (2 - 1 - math.log(2)) / 5)
    assert found["by_age"]["0"] == {
        "tokens": 3,
        "answers": 2,
        "ratio_mean": 1.0,
        "ess": 1.0,
        "ess_sequence": 1.0,
        "kl": 0.0,
        "log_ratio_max": 0.0,
        "log_ratio_p999": 0.0,
        "clip_fraction": 0.0,
        "clip_fraction_positive": 0.0,
        "clip_fraction_negative": 0.0,
        "mask_fraction": 0.0,
        "mask_fraction_positive": 0.0,
        "mask_fraction_negative": 0.0,
        "token_grad": 3 / 5,
        "token_grad_share": 3 / 7,
        **dict.fromkeys(("mismatch_mean", "mismatch_max", "staleness_mean", "staleness_kl")),
    }
    old = found["by_age"]["1"]
    assert (old["tokens"], old["answers"], old["clip_fraction"], old["token_grad_share"]) == (2, 1, 1.0, 4 / 7)
    assert (old["ratio_mean"], old["log_ratio_max"]) == (pytest.approx(2), pytest.approx(math.log(2)))
    assert old["clip_fraction_positive"] is old["clip_fraction_negative"] is None  # nobody is better than anybody
    assert {length: bucket["tokens"] for length, bucket in found["by_length"].items()} == {"1": 1, "2-3": 4}
    assert (found["mismatch/age0"], found["mismatch/age0_error"], found["mismatch/age0_kl"]) == (0.0, 1.0, 0.0)
    json.dumps(found, allow_nan=False)


def test_engine_and_learner_are_compared_where_the_weights_are_the_same(make_row, make_group) -> None:
    """Which is in the first update only: what a later one sees at age 0 has moved."""
    moved = {0: 1.5, 1: 2.0}
    fresh = metrics(make_row, make_group, moved)
    assert fresh["mismatch/age0"] == pytest.approx(math.log(1.5), rel=1e-6)
    assert fresh["mismatch/age0_error"] == pytest.approx(1.5, rel=1e-6)
    assert fresh["mismatch/age0_kl"] == pytest.approx(0.5 - math.log(1.5), rel=1e-6)
    found = metrics(make_row, make_group, moved, first=0)
    assert found["mismatch/age0"] is None
    assert found["by_age"]["0"]["ratio_mean"] == pytest.approx(1.5)


def test_the_ratio_splits_into_the_engines_mismatch_and_staleness(make_row, make_group) -> None:
    found = metrics(make_row, make_group, {0: 1.0, 1: 6.0}, mismatches={0: 0.5, 1: 3.0})
    both = found["by_age"]
    assert [both[age]["mismatch_mean"] for age in "01"] == pytest.approx([0.5, 3])
    assert [both[age]["mismatch_max"] for age in "01"] == pytest.approx([math.log(2), math.log(3)])
    assert [both[age]["staleness_mean"] for age in "01"] == pytest.approx([2, 2])
    assert [both[age]["staleness_kl"] for age in "01"] == pytest.approx([-math.log(2)] * 2)
    assert found["mismatch/mean"] == pytest.approx((3 * 0.5 + 2 * 3) / 5)
    assert found["mismatch/max"] == pytest.approx(math.log(3))
    assert found["weight/cut"] == pytest.approx(2 / 5)
    assert found["staleness/mean"] == pytest.approx(2)
    assert found["staleness/kl"] == pytest.approx(-math.log(2))
    assert (found["proximal/behaviour_tokens"], found["proximal/approximate_tokens"]) == (0, 0)
    json.dumps(found, allow_nan=False)


def test_tokens_whose_version_is_not_held_are_counted_and_in_no_factor(make_row, make_group) -> None:
    found = metrics(make_row, make_group, {0: 1.0, 1: 6.0}, mismatches={0: 0.5})
    assert found["mismatch/mean"] == found["by_age"]["0"]["mismatch_mean"] == pytest.approx(0.5)
    assert found["by_age"]["1"]["mismatch_mean"] is found["by_age"]["1"]["staleness_kl"] is None
    assert found["proximal/behaviour_tokens"] == 2
    none = metrics(make_row, make_group, {0: 1.0, 1: 6.0})
    assert none["proximal/behaviour_tokens"] == none["tokens"]
    assert none["mismatch/mean"] is none["mismatch/max"] is none["staleness/mean"] is none["staleness/kl"] is None


def test_entropy_and_the_divergence_from_a_reference_are_means_over_trained_tokens(make_row, make_group) -> None:
    """Three tokens with a ratio of 1 and two with 2, log pi - log ref = log 3 and log 6."""
    found = metrics(make_row, make_group, {0: 1.0, 1: 2.0}, reference=-math.log(3))
    assert found["entropy"] == 0.5
    assert found["kl_reference"] == pytest.approx((3 * math.log(3) + 2 * 2 * math.log(6)) / 5, rel=1e-5)
    assert metrics(make_row, make_group, {0: 1.0, 1: 2.0})["kl_reference"] is None


def test_what_follows_a_change_of_weights_is_told_apart(make_row, make_group) -> None:
    """Rows of versions 1 1 2 2 3 and 2 2: the second row's weights never changed."""
    rows = [make_row([9, 9], [1] * n, [-1.0] * n, reward=0.0, member=m) for m, n in enumerate((5, 2))]
    rows[0].versions[2:] = [1, 1, 2, 2, 3]
    rows[1].versions[2:] = [2, 2]
    packed = pack([to_batch(make_group(rows))])
    assert continued(packed).astype(int).tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0]


def test_a_batch_in_which_nothing_is_scored_has_no_averages_and_no_nan(make_row, make_group) -> None:
    rows = [make_row([1], [2], [-1.0], reward=math.nan, member=m, failure="verifier_raised") for m in range(2)]
    packed = pack([to_batch(make_group(rows))])
    batch = make_batch(packed, version=0, max_age=0)
    empty = np.zeros(len(batch.token_ids))
    numbers, flags = empty.astype(np.float32), empty.astype(bool)
    seen = Seen(
        0.0,
        0,
        flags,
        numbers,
        numbers,
        flags,
        empty.astype(np.uint8),
        flags,
        flags,
        numbers,
        numbers,
        numbers,
        numbers,
        nonfinite=0,
    )
    worth = advantages(batch.rewards, batch.groups, "group-mean-std")
    found = step_metrics(packed, batch, worth, seen, first=np.arange(len(batch.token_ids)), update="recompute")
    assert (found["reward/mean"], found["ess"], found["age/max"], found["mismatch/age0"]) == (None,) * 4
    assert (found["zero_variance"], found["tokens"], found["failures"]) == (1.0, 0, {"verifier_raised": 2})
    json.dumps(found, allow_nan=False)


def test_rewards_of_each_task_of_a_mixture_stand_apart(make_row, make_group) -> None:
    def of(task: str, number: int, *rewards: float, **info: float):
        made = (make_row([1], [2], [-1.0], reward=r, weights=Weights(1, 3), member=n) for n, r in enumerate(rewards))
        rows = [replace(row, info=info, reward_parts={"exact": row.reward}) for row in made]
        return to_batch(replace(make_group(rows, ticket=number), task=task))

    packed = pack([of("a", 0, 1.0, 0.0), of("b", 1, -0.5, math.nan, outcome=1.0), of("a", 2, 1.0)])
    assert task_metrics(packed, ["a", "b", "c"]) == {
        **{"reward/mean/a": pytest.approx(2 / 3), "reward/mean/b": -0.5, "reward/mean/c": None},
        **{"outcome/mean/a": pytest.approx(2 / 3), "outcome/mean/b": 1.0, "outcome/mean/c": None},
        **{"reward/std/a": pytest.approx(2**0.5 / 3), "reward/std/b": 0.0, "reward/std/c": None},
        **{"reward_part/a/exact": pytest.approx(2 / 3), "reward_part/b/exact": -0.5},
    }
    assert task_metrics(packed, []) == {}
