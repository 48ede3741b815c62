"""The draw: exact log-probabilities, the right distribution, a pure function of the request."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.collectors.engines.sampling import draw, uniforms


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(0.5, -0.142932), (1.0, -0.407606), (2.0, -0.680270), (0.0, -0.407606)],
)
def test_the_logprob_is_that_of_the_distribution_drawn_from(temperature: float, expected: float) -> None:
    ids, logprobs = draw(torch.tensor([[2.0, 1.0, 0.0]]), [temperature], [0.0])
    assert ids.tolist() == [0]
    assert logprobs.item() == pytest.approx(expected, abs=1e-6)


def test_frequencies_follow_the_distribution() -> None:
    logits, n = torch.tensor([1.0, 0.0, -1.0, -3.0]), 20_000
    ids, _ = draw(logits.expand(n, -1), [0.8] * n, uniforms(7, n).tolist())
    p = (logits / 0.8).softmax(-1).numpy()
    frequencies = np.bincount(ids.numpy(), minlength=4) / n
    assert np.all(np.abs(frequencies - p) < 5 * np.sqrt(p * (1 - p) / n))


@given(seed=st.integers(0, 2**128 - 1))
def test_uniforms_are_those_of_philox_keyed_by_the_seed(seed: int) -> None:
    raw = np.random.Philox(key=seed).random_raw(9)
    np.testing.assert_array_equal(uniforms(seed, 9), (raw >> np.uint64(12)) * 2.0**-52)


@given(st.integers(0, 2**63 - 1), st.integers(1, 50), st.integers(0, 50))
def test_uniforms_are_a_pure_function_of_seed_and_position(seed: int, count: int, more: int) -> None:
    short, long = uniforms(seed, count), uniforms(seed, count + more)
    assert short.tolist() == long[:count].tolist()
    assert np.all((long >= 0) & (long < 1))


def test_neighbouring_seeds_give_independent_numbers() -> None:
    columns = np.stack([uniforms(seed, 2000) for seed in range(20)])
    correlation = np.corrcoef(columns) - np.eye(20)
    assert np.abs(correlation).max() < 0.1


@given(
    st.lists(st.floats(-30, 30), min_size=1, max_size=8),
    st.sampled_from([0.0, 2.0**-52, 0.5, 1 - 2.0**-52]),
    st.integers(0, 7),
)
def test_a_token_without_mass_is_never_drawn(scores: list[float], uniform: float, hole: int) -> None:
    logits = torch.tensor([scores])
    hole %= len(scores)
    if len(scores) > 1:
        logits[0, hole] = -math.inf
    ids, logprobs = draw(logits, [1.0], [uniform])
    assert math.isfinite(logprobs.item())
    assert len(scores) == 1 or ids.item() != hole


def test_rows_do_not_influence_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 11, generator=generator)
    temperatures, uniform = [1.0, 0.0, 0.5, 2.0, 1.0, 0.0], [0.1, 0.9, 0.3, 0.99, 0.5, 0.0]
    ids, logprobs = draw(logits, temperatures, uniform)
    for row in range(6):
        alone, alone_logprobs = draw(logits[row : row + 1], temperatures[row : row + 1], uniform[row : row + 1])
        assert alone.item() == ids[row].item()
        assert alone_logprobs.item() == pytest.approx(logprobs[row].item(), abs=1e-6)


def test_a_row_with_nan_says_so() -> None:
    _, logprobs = draw(torch.tensor([[0.0, math.nan], [0.0, 1.0]]), [1.0, 1.0], [0.5, 0.5])
    assert math.isnan(logprobs[0].item())
    assert math.isfinite(logprobs[1].item())
