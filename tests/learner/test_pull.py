"""The norm of a token's gradient at its logits, against the gradient itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.learners.pull import pull_of


def at_the_logits(logits: torch.Tensor, token: int, slope: float) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Norm of slope x d log p(token) / d logits by autograd; log p and the sum of p^2, in the type of `logits`."""
    logits = logits.clone().requires_grad_()
    logprob = torch.log_softmax(logits, 0)[token]
    (gradient,) = torch.autograd.grad(slope * logprob, logits)
    probability = torch.softmax(logits.detach(), 0)
    return float(gradient.norm()), logprob.detach(), (probability**2).sum()


@given(st.integers(0, 10**6), st.floats(0.01, 5), st.floats(-3, 3))
def test_it_is_that_of_the_gradient(seed: int, spread: float, slope: float) -> None:
    logits = spread * torch.randn(30, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    expected, logprob, collision = at_the_logits(logits, seed % 30, slope)
    found = pull_of(torch.tensor(slope, dtype=torch.float64), logprob, collision)
    assert float(found) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_a_token_that_was_nearly_certain_pulls_little_and_not_as_rounding_has_it() -> None:
    """Control: 1 - 2 p + sum of p^2 in float32 is off by more than the norm itself."""
    logits = torch.zeros(10)
    logits[3] = 16.0
    expected, _, _ = at_the_logits(logits.double(), 3, 1.0)
    _, logprob, collision = at_the_logits(logits, 3, 1.0)
    assert float(pull_of(torch.tensor(1.0), logprob, collision)) == pytest.approx(expected, rel=0.5)
    naive = torch.sqrt(torch.clamp(1 - 2 * logprob.exp() + collision, min=0.0))
    assert abs(float(naive) / expected - 1) > 0.9
