"""The effective sample size of whole answers, in log space and over ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.learners.ess import Weighed, answer_log_ratios, from_slots, slots

log_weights = st.lists(st.floats(-30, 30), min_size=1, max_size=40).map(np.array)


@given(log_weights)
def test_it_is_kishs_share_and_does_not_know_the_weights_scale(logs: np.ndarray) -> None:
    w = np.exp(logs)
    found = Weighed.of(logs).ess
    assert found == pytest.approx(w.sum() ** 2 / (len(w) * (w**2).sum()))
    assert 1 / len(w) - 1e-9 <= found <= 1 + 1e-9
    assert Weighed.of(logs + 1e4).ess == pytest.approx(found)


@given(log_weights, st.integers(1, 4))
def test_any_split_over_ranks_has_that_of_the_whole_and_every_rank_the_same_bits(logs: np.ndarray, size: int) -> None:
    """Some ranks may have no answer at all."""
    shares = [Weighed.of(logs[rank::size]) for rank in range(size)]
    sent = np.array([slots(share, rank=rank, size=size) for rank, share in enumerate(shares)])
    received = [sum(sent[(start + n) % size] for n in range(size)) for start in range(size)]  # each in its own order
    merged = {from_slots(values.tolist()) for values in received}
    assert len(merged) == 1
    assert merged.pop().ess == pytest.approx(Weighed.of(logs).ess)


def test_answers_of_32_000_tokens_have_a_finite_share() -> None:
    """Their weights would be exp(+-16,000). Control: the weights themselves have none."""
    n = 32_000
    ones, drift = np.ones(n, np.float32), np.float32(0.5)
    logprobs = np.concatenate([-ones, -ones - drift, -ones + drift])
    behaviour = np.concatenate([-ones, -ones, -ones])
    log_ratios, some = answer_log_ratios(logprobs, behaviour, np.ones(3 * n, np.bool_), np.repeat(np.arange(3), n))
    assert log_ratios.tolist() == [0.0, -16_000.0, 16_000.0]
    assert some.all()
    assert Weighed.of(log_ratios).ess == 1 / 3
    with np.errstate(over="ignore", invalid="ignore"):
        w = np.exp(log_ratios)
        assert not np.isfinite(w.sum() ** 2 / (w**2).sum())


def test_an_answer_is_all_its_measured_tokens_and_one_without_any_does_not_count() -> None:
    measured = np.array([1, 1, 0, 0, 0, 1], np.bool_)
    logprobs = np.array([-1, -2, -9, -9, -9, -3], np.float32)
    log_ratios, some = answer_log_ratios(logprobs, np.full(6, -1, np.float32), measured, np.array([0, 0, 0, 1, 1, 2]))
    assert (log_ratios.tolist(), some.tolist()) == ([-1.0, 0.0, -2.0], [True, False, True])
    assert Weighed.of(log_ratios[:0]).ess is None
