"""Buckets of a step: by age and by length, with masks, over any tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.learners.batch import Batch
from asyncrl.learners.buckets import Apart, length_name
from asyncrl.learners.step import Seen
from asyncrl.telemetry.names import BUCKET


def a_step(seed: int, rows: int, farthest: float = 1.0) -> tuple[Batch, np.ndarray, Seen, np.ndarray]:
    """Of answers of 1 to 9 sampled tokens after one of a prompt. Some are masked before they are measured, some after,
    some are not finite. Batch, advantages, what was seen, sampled tokens of each row."""
    rng = np.random.default_rng(seed)
    sampled = rng.integers(1, 10, rows)
    lengths = sampled + 1
    n = int(lengths.sum())
    trained = np.ones(n, np.bool_)
    trained[np.cumsum(lengths) - lengths] = False
    finite = trained & (rng.random(n) < 0.95)
    known = trained & (rng.random(n) < 0.1)  # token-age
    measured = finite & ~known
    late = measured & (rng.random(n) < 0.2)  # dppo-tv
    included = measured & ~late
    behaviour = rng.normal(-2, 1, n).astype(np.float32)
    batch = Batch(
        token_ids=torch.zeros(n, dtype=torch.int64),
        trained=torch.from_numpy(trained),
        behaviour=torch.from_numpy(np.where(trained, behaviour, 0)),
        ages=torch.from_numpy(np.where(trained, rng.integers(0, 4, n), -1)),
        lengths=lengths,
        rewards=np.zeros(rows),
        outcomes=np.zeros(rows),
        groups=np.arange(rows),
        answers=np.arange(rows),
        truncated=np.zeros(rows, np.bool_),
        support=None,
        nonfinite=0,
        masked={},
    )
    logprobs = np.where(measured, behaviour + rng.normal(0, farthest, n), 0).astype(np.float32)
    unasked = {field.name: np.full(n, np.nan, np.float32) for field in dataclasses.fields(Seen)}
    numbers = np.where(included, rng.random(n), 0).astype(np.float32)
    told = {
        "loss_sum": 0.0,
        "units": float(included.sum()),
        "included": included,
        "logprobs": logprobs,
        "ratio": numbers,
        "clipped": included & (rng.random(n) < 0.3),
        "masked": np.where(known, 6, np.where(late, 1, 0)).astype(np.uint8),
        "measured": measured,
        "cut": np.zeros(n, np.bool_),
        "pulls": numbers,
        "nonfinite": int((trained & ~finite & ~known).sum()),
    }
    seen = Seen(**{**unasked, **told})
    return batch, rng.normal(size=rows), seen, sampled


@given(st.integers(0, 10**6), st.integers(1, 12))
def test_buckets_are_a_partition_of_the_step(seed: int, rows: int) -> None:
    """Counts and sums add up, means do by their weights, and a largest one is that of some bucket."""
    batch, worth, seen, sampled = a_step(seed, rows)
    apart = Apart(batch, worth, seen)
    whole = apart.whole()
    asked = seen.included | (seen.masked > 0)
    for buckets in (apart.by_age(), apart.by_length(sampled)):
        every = list(buckets.values())
        assert all(bucket.keys() == BUCKET.keys() for bucket in every)
        assert sum(bucket["tokens"] for bucket in every) == whole["tokens"] == seen.tokens
        assert sum(bucket["answers"] for bucket in every) == whole["answers"]
        assert sum(bucket["token_grad"] for bucket in every) == pytest.approx(whole["token_grad"])
        if whole["tokens"]:
            clipped = sum(bucket["tokens"] * (bucket["clip_fraction"] or 0.0) for bucket in every)
            assert clipped == pytest.approx(whole["tokens"] * whole["clip_fraction"])
            assert sum(bucket["token_grad_share"] for bucket in every) == pytest.approx(1)
        if seen.measured.any():
            assert max(bucket["log_ratio_max"] or 0.0 for bucket in every) == whole["log_ratio_max"]
            assert all((bucket["kl"] or 0.0) >= 0 for bucket in every)
    assert whole["mask_fraction"] == (pytest.approx((seen.masked > 0).sum() / asked.sum()) if asked.any() else None)


def test_a_mask_hides_no_distance_and_leaves_what_was_trained() -> None:
    """The farthest token is masked: it is in the distances, and in none of what the step did."""
    batch, worth, seen, _ = a_step(3, 8)
    place = int(np.flatnonzero(seen.masked == 1)[0])
    seen.logprobs[place] = batch.behaviour.numpy()[place] + 7.5
    whole = Apart(batch, worth, seen).whole()
    assert whole["log_ratio_max"] == pytest.approx(7.5, rel=1e-6)
    assert whole["kl"] > np.exp(7.5) / 100
    assert whole["tokens"] == int(seen.included.sum())


def test_a_broken_ratio_gives_finite_numbers() -> None:
    batch, worth, seen, sampled = a_step(5, 6, farthest=5000.0)
    apart = Apart(batch, worth, seen)
    for bucket in (apart.whole(), *apart.by_age().values(), *apart.by_length(sampled).values()):
        numbers = [value for value in bucket.values() if value is not None]
        assert np.isfinite(numbers).all(), bucket
    assert apart.whole()["ess_sequence"] == pytest.approx(1 / 6)


@pytest.mark.parametrize(("tokens", "name"), [(1, "1"), (2, "2-3"), (3, "2-3"), (4, "4-7"), (32_768, "32768-65535")])
def test_a_length_has_the_same_name_in_every_run(tokens: int, name: str) -> None:
    assert length_name(int(np.frexp(tokens)[1])) == name


def test_the_last_per_mille_is_that_of_the_tokens_and_not_of_a_line_between_them() -> None:
    rng = np.random.default_rng(0)
    batch, worth, seen, _ = a_step(0, 900)
    far: Any = np.abs(seen.logprobs[seen.measured].astype(np.float64) - batch.behaviour.numpy()[seen.measured])
    found = Apart(batch, worth, seen).whole()["log_ratio_p999"]
    assert found in rng.permutation(far)
    assert (far <= found).mean() >= 0.999
    assert (far < found).mean() < 0.999
