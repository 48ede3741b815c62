"""The decoupled objective: the engine's mismatch is a weight, staleness is clipped, against exact enumeration."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.config.objective import Objective
from asyncrl.config.recipe import Recipe
from asyncrl.learners.batch import Batch
from asyncrl.learners.forward import token_logprobs
from asyncrl.learners.model import load_model
from asyncrl.learners.objectives.ppo_clip import ppo_clip
from asyncrl.learners.objectives.ratio import LOG_RATIO_LIMIT
from asyncrl.learners.objectives.weights import token_tis
from asyncrl.learners.shares import share_of
from asyncrl.learners.step import accumulate
from asyncrl.schema import to_batch

OPTIONS: dict[str, Any] = {"objective": Objective(preset="grpo", proximal="behaviour-version"), "temperature": 1.0}
CAP = 2.0
"""Of the weight that such an objective has by default."""


def test_the_weight_is_the_ratio_up_to_its_cap_and_always_finite() -> None:
    ratios = [1.0, 0.25, 1.9, 2.5, 100.0]
    found = token_tis(torch.tensor([math.log(ratio) for ratio in ratios]), cap=CAP)
    assert found.cut.tolist() == [ratio > CAP for ratio in ratios]
    torch.testing.assert_close(found.weight, torch.tensor([1.0, 0.25, 1.9, CAP, CAP]))
    absurd = token_tis(torch.tensor([899.0, -899.0]), cap=1e30)
    torch.testing.assert_close(absurd.weight, torch.tensor([LOG_RATIO_LIMIT, -LOG_RATIO_LIMIT]).exp())
    assert token_tis(torch.tensor([0.0]), cap=CAP).weight.item() == 1.0


def expected_gradient(current: Tensor, proximal: Tensor, engine: Tensor, rewards: Tensor, *, split: bool) -> Tensor:
    """Over all answers of one token, by the engine's probabilities. split: by both factors, else by the plain ratio."""
    found = torch.zeros_like(current)
    for token in range(len(current)):
        logprob = torch.log_softmax(current, 0)[token : token + 1]
        mu = torch.log_softmax(engine, 0)[token : token + 1]
        anchor = torch.log_softmax(proximal, 0)[token : token + 1] if split else mu
        terms = ppo_clip(logprob, anchor, rewards[token : token + 1], epsilon=0.2, epsilon_high=0.28)
        loss = (token_tis(anchor - mu, cap=CAP).weight * terms.loss).sum() * mu.exp().sum()
        (gradient,) = torch.autograd.grad(loss, current)
        found -= gradient
    return found


def test_the_expected_gradient_is_that_of_an_exact_engine_by_exact_enumeration() -> None:
    """With both factors the objective is the one that samples of pi_v itself would give, clip and all, whatever the
    engine computes. Negative control: with the plain ratio it is another, since the clip is elsewhere."""
    generator = torch.Generator().manual_seed(0)
    proximal = torch.randn(8, dtype=torch.float64, generator=generator)
    current = (proximal + 0.4 * torch.randn(8, dtype=torch.float64, generator=generator)).requires_grad_()
    moved = (torch.softmax(current, 0) / torch.softmax(proximal, 0)).detach()
    rewards = torch.sign(moved - 1) * torch.linspace(0.5, 2, 8, dtype=torch.float64)  # training went where it should
    exact = expected_gradient(current, proximal, proximal, rewards, split=True)
    assert 0 < ((moved < 0.8) | (moved > 1.28)).sum() < 8, "the clip takes some, and leaves some"
    worst = 0.0
    for _ in range(5):
        engine = proximal + 0.2 * torch.randn(8, dtype=torch.float64, generator=generator)
        apart = torch.softmax(proximal, 0) / torch.softmax(engine, 0)
        assert apart.max() < CAP
        found = expected_gradient(current, proximal, engine, rewards, split=True)
        torch.testing.assert_close(found, exact, atol=1e-12, rtol=1e-12)
        plain = expected_gradient(current, proximal, engine, rewards, split=False)
        worst = max(worst, float((plain - exact).abs().max()))
    assert worst > 1e-2


@pytest.fixture(scope="module")
def own(make_row: Any, make_group: Any) -> tuple[Batch, Any]:
    """Three groups, each with an answer that is better than the other."""
    generator = np.random.default_rng(3)
    groups = []
    for ticket in range(3):
        rows = []
        for member in range(2):
            n = int(generator.integers(2, 7))
            completion, logprobs = generator.integers(0, 24, n).tolist(), generator.normal(-3, 0.4, n).tolist()
            rows.append(make_row([1, 2, 3], completion, logprobs, reward=float(member), member=member))
        groups.append(to_batch(make_group(rows, ticket=ticket)))
    return share_of(groups, version=1, recipe=Recipe(objective=Objective(preset="grpo")))


def gradients(model: Any, own: tuple[Batch, Any], proximal: Tensor | None, max_tokens: int = 20) -> Tensor:
    model.zero_grad()
    accumulate(model, *own, **OPTIONS, max_tokens=max_tokens, proximal=proximal)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_a_step_has_the_gradient_of_the_formula_and_the_behaviour_where_no_version_is_known(
    model_path: Path, own: tuple[Batch, Any]
) -> None:
    batch, worth = own
    model = load_model(model_path, "float32", "auto")
    cu = torch.tensor([0, *np.cumsum(batch.lengths)])
    with torch.no_grad():
        near = token_logprobs(model, batch.token_ids, cu)
    generator = torch.Generator().manual_seed(1)
    proximal = near + 0.2 * torch.randn(near.shape, generator=generator)
    proximal[torch.rand(near.shape, generator=generator) < 0.3] = torch.nan
    found = gradients(model, own, proximal)

    model.zero_grad()
    logprobs = token_logprobs(model, batch.token_ids, cu)
    total = torch.zeros(())
    for t in torch.nonzero(batch.trained).squeeze(1).tolist():
        a, mu = float(np.repeat(worth, batch.lengths)[t]), float(batch.behaviour[t])
        pi_v = mu if torch.isnan(proximal[t]) else float(proximal[t])
        r = torch.exp(logprobs[t] - pi_v)
        total = total - min(math.exp(pi_v - mu), 2.0) * torch.minimum(r * a, torch.clamp(r, 0.8, 1.28) * a)
    total.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert expected.abs().max() > 1e-2
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    for max_tokens in (1, 1000):
        torch.testing.assert_close(gradients(model, own, proximal, max_tokens), found, atol=1e-5, rtol=1e-4)


def test_without_a_known_version_the_step_is_the_plain_one_bit_for_bit(
    model_path: Path, own: tuple[Batch, Any]
) -> None:
    model = load_model(model_path, "float32", "auto")
    plain = gradients(model, own, None)
    unknown = torch.full((len(own[0].token_ids),), torch.nan)
    assert torch.equal(gradients(model, own, unknown), plain)
    assert torch.equal(gradients(model, own, own[0].behaviour.clone()), plain)
