"""The clipped surrogate against numbers by hand, exact enumeration and other ways of splitting a batch."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.config.recipe import Objective
from asyncrl.learners.advantages import advantages
from asyncrl.learners.batch import make_batch
from asyncrl.learners.model import load_model
from asyncrl.learners.objectives.aggregate import token_sum
from asyncrl.learners.objectives.ppo_clip import ppo_clip
from asyncrl.learners.objectives.ratio import LOG_RATIO_LIMIT
from asyncrl.learners.step import accumulate
from asyncrl.schema import pack, to_batch


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.2, 2.0, -2.4, -2.4, False),
        (1.5, 2.0, -2.56, 0.0, True),  # above 1 + 0.28, and better than before: far enough
        (1.5, -2.0, 3.0, 3.0, False),  # above, and worse than before: back, without limit
        (0.5, 2.0, -1.0, -1.0, False),
        (0.5, -2.0, 1.6, 0.0, True),  # below 1 - 0.2
        (3.0, 0.0, 0.0, 0.0, False),
    ],
)
def test_loss_and_slope_by_hand(ratio: float, advantage: float, loss: float, slope: float, clipped: bool) -> None:
    logprob = torch.tensor([math.log(ratio) - 1.0], requires_grad=True)
    out = ppo_clip(logprob, torch.tensor([-1.0]), torch.tensor([advantage]), epsilon=0.2, epsilon_high=0.28)
    (gradient,) = torch.autograd.grad(out.loss.sum(), logprob)
    assert out.loss.item() == pytest.approx(loss, rel=1e-5)
    assert gradient.item() == pytest.approx(slope, rel=1e-5)
    assert out.ratio.item() == pytest.approx(ratio, rel=1e-5)
    assert bool(out.clipped) is clipped


def test_an_absurd_ratio_stays_finite_and_gives_no_gradient() -> None:
    logprob = torch.tensor([-1.0], requires_grad=True)
    out = ppo_clip(logprob, torch.tensor([-500.0]), torch.tensor([-1.0]), epsilon=0.2, epsilon_high=0.28)
    out.loss.sum().backward()
    assert out.ratio.item() == pytest.approx(math.exp(LOG_RATIO_LIMIT))
    assert logprob.grad is not None
    assert logprob.grad.item() == 0.0


def test_tokens_outside_the_mask_do_not_count_not_even_as_nan() -> None:
    losses = torch.tensor([1.0, math.nan, math.inf, 3.0], requires_grad=True)
    total = token_sum(losses, torch.tensor([True, False, False, True]))
    total.backward()
    assert total.item() == 4.0
    assert losses.grad is not None
    assert losses.grad.tolist() == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("behaviour_is_current", [True, False])
def test_expected_gradient_is_the_policy_gradient_by_exact_enumeration(behaviour_is_current: bool) -> None:
    """All completions of a toy policy (2 tokens of 3, each step its own table) weighted by their probability.

    The expected gradient of the surrogate's SUM equals that of the expected reward: at lag 0 for whole completions, and
    with an older behaviour policy, clip out of reach, for single tokens, where the token's ratio is all of it.
    """
    torch.manual_seed(0)
    first = torch.randn(3, dtype=torch.float64, requires_grad=True)
    second = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    rewards = torch.randn(3, 3, dtype=torch.float64)
    tables = [first, second]
    steps = 2 if behaviour_is_current else 1
    old = first.detach() if behaviour_is_current else first.detach() + 0.3 * torch.randn(3, dtype=torch.float64)

    p_first, p_second = torch.softmax(first, 0), torch.softmax(second, 1)
    value = (p_first[:, None] * p_second * rewards).sum() if steps == 2 else (p_first * rewards[:, 0]).sum()
    wanted = torch.autograd.grad(value, tables, allow_unused=True)

    found = [torch.zeros_like(table) for table in tables]
    for completion in itertools.product(range(3), repeat=steps):
        logprobs = [torch.log_softmax(first, 0)[completion[0]]]
        behaviour = [torch.log_softmax(old, 0)[completion[0]]]
        if steps == 2:
            logprobs.append(torch.log_softmax(second[completion[0]], 0)[completion[1]])
            behaviour.append(logprobs[1].detach())
        reward = rewards[completion[0], completion[1] if steps == 2 else 0]
        mu = torch.stack(behaviour)
        out = ppo_clip(torch.stack(logprobs), mu, reward.expand(steps), epsilon=0.99, epsilon_high=100.0)
        loss = token_sum(out.loss, torch.ones(steps, dtype=torch.bool)) * mu.sum().exp().detach()
        for total, gradient in zip(found, torch.autograd.grad(loss, tables, allow_unused=True), strict=True):
            total -= 0 if gradient is None else gradient
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, atol=1e-12, rtol=1e-12)


def test_leave_one_out_baseline_leaves_the_expected_gradient_alone() -> None:
    """All pairs of one-token completions: with the baseline, in expectation, twice the gradient of the mean reward."""
    torch.manual_seed(1)
    table = torch.randn(3, dtype=torch.float64, requires_grad=True)
    rewards = np.array([0.3, -1.0, 2.0])
    (wanted,) = torch.autograd.grad((torch.softmax(table, 0) * torch.tensor(rewards)).sum(), table)
    found = torch.zeros_like(table)
    for pair in itertools.product(range(3), repeat=2):
        logprobs = torch.log_softmax(table, 0)[list(pair)]
        worth = advantages(rewards[list(pair)], np.zeros(2, np.int64), "leave-one-out").values
        mu = logprobs.detach()
        out = ppo_clip(logprobs, mu, torch.tensor(worth), epsilon=0.2, epsilon_high=0.28)
        (gradient,) = torch.autograd.grad(out.loss.sum() * mu.sum().exp(), table)
        found -= gradient
    torch.testing.assert_close(found, 2 * wanted, atol=1e-12, rtol=1e-12)


def test_the_gradient_does_not_depend_on_how_the_batch_is_split(model_path: Path, make_row, make_group) -> None:
    torch.manual_seed(3)
    groups = []
    for ticket in range(4):
        rows = []
        for member in range(4):
            c = int(torch.randint(1, 9, ()))
            completion = torch.randint(0, 24, (c,)).tolist()
            logprobs = (-3 + 0.5 * torch.randn(c)).tolist()
            rows.append(make_row([1, 2, 3], completion, logprobs, reward=float(member == ticket), member=member))
        groups.append(to_batch(make_group(rows, ticket=ticket)))
    batch = make_batch(pack(groups), version=1, max_age=1)
    worth = advantages(batch.rewards, batch.groups, "group-mean-std").values
    model = load_model(model_path, "float32", "auto")

    def gradient(max_tokens: int) -> tuple[int, torch.Tensor]:
        model.zero_grad()
        seen = accumulate(
            model, batch, worth, objective=Objective(preset="grpo"), temperature=1.0, max_tokens=max_tokens
        )
        return seen.tokens, torch.cat(
            [p.grad.flatten() / seen.tokens for p in model.parameters() if p.grad is not None]
        )

    tokens, whole = gradient(10**6)
    assert whole.abs().max() > 1e-3
    for max_tokens in (1, 9, 17, 40, 100):
        again, split = gradient(max_tokens)
        assert again == tokens
        torch.testing.assert_close(split, whole, atol=1e-6, rtol=1e-5)
