"""Parts of an objective: numbers by hand, and numbers that are broken."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.config.objective import (
    BehaviourKl,
    DppoTv,
    GeometricSequence,
    GeometricWeight,
    K3Mask,
    NoWeight,
    Objective,
    Opsm,
    Preset,
    SequenceMis,
    SequenceTis,
    TokenIcepop,
    TokenTis,
)
from asyncrl.learners.objectives import masks, weights
from asyncrl.learners.objectives.anchors import kl_to_behaviour
from asyncrl.learners.objectives.cispo import cispo
from asyncrl.learners.objectives.compose import terms_of
from asyncrl.learners.objectives.gspo import gspo
from asyncrl.learners.objectives.ppo_clip import ppo_clip
from asyncrl.learners.objectives.sequences import Sequences

TWO = Sequences(torch.tensor([0, 2, 3]), torch.tensor([True, True, True]))
"""Two answers, of two tokens and of one."""


def logs(*ratios: float) -> Tensor:
    return torch.tensor(ratios).log()


def test_weights_by_hand() -> None:
    w = logs(2.0, 0.5, 4.0)
    assert weights.no_weight(w).weight.tolist() == [1, 1, 1]
    torch.testing.assert_close(weights.token_tis(w, cap=3.0).weight, torch.tensor([2.0, 0.5, 3.0]))
    assert weights.token_tis(w, cap=3.0).cut.tolist() == [False, False, True]
    icepop = weights.token_icepop(w, low=0.6, high=5.0)
    torch.testing.assert_close(icepop.weight, torch.tensor([2.0, 0.0, 4.0]))
    assert icepop.cut.tolist() == [False, True, False]
    torch.testing.assert_close(weights.sequence_tis(w, TWO, cap=3.0).weight, torch.tensor([1.0, 1.0, 3.0]))
    torch.testing.assert_close(weights.sequence_mis(w, TWO, low=0.5, high=2.0).weight, torch.tensor([1.0, 1.0, 0.0]))
    torch.testing.assert_close(
        weights.geometric(logs(2.0, 8.0, 0.5), TWO, cap=5.0).weight, torch.tensor([4.0, 4.0, 0.5])
    )


def test_weights_and_masks_do_not_see_tokens_that_are_not_trained() -> None:
    """Not even as NaN, and not in the length that a mean divides by."""
    some = Sequences(torch.tensor([0, 3]), torch.tensor([True, False, True]))
    w = torch.tensor([math.log(2), math.nan, math.log(8)])
    torch.testing.assert_close(weights.sequence_tis(w, some, cap=99.0).weight, torch.full((3,), 16.0))
    torch.testing.assert_close(weights.geometric(w, some, cap=99.0).weight, torch.full((3,), 4.0))
    assert not masks.geometric_sequence(w, some, low=3.9, high=4.1).any()


@given(per_token=st.floats(-50, 50), tokens=st.sampled_from([1, 1000, 32_000]))
def test_weights_of_answers_are_finite_whatever_their_length(per_token: float, tokens: int) -> None:
    sequences = Sequences(torch.tensor([0, tokens]), torch.ones(tokens, dtype=torch.bool))
    w = torch.full((tokens,), per_token)
    for found in (
        weights.token_tis(w, cap=1e30),
        weights.sequence_tis(w, sequences, cap=1e30),
        weights.sequence_mis(w, sequences, low=0.0, high=1e30),
        weights.geometric(w, sequences, cap=1e30),
    ):
        assert torch.isfinite(found.weight).all()
        assert not found.weight.requires_grad


def test_thirty_two_thousand_small_differences_are_a_product_and_not_noise() -> None:
    n = 32_000
    sequences = Sequences(torch.tensor([0, n]), torch.ones(n, dtype=torch.bool))
    found = weights.sequence_tis(torch.full((n,), 1e-5), sequences, cap=10.0).weight
    torch.testing.assert_close(found, torch.full((n,), math.exp(0.32)), rtol=1e-4, atol=0)


def test_masks_by_hand() -> None:
    mu, worth = logs(0.5, 0.5, 0.001), torch.tensor([1.0, -1.0, 1.0])
    moved = logs(0.8, 0.2, 0.01)
    assert masks.dppo_tv(moved, mu, worth, threshold=0.2).tolist() == [True, True, False]  # rare: ten times, and 0.009
    assert masks.dppo_tv(moved, mu, -worth, threshold=0.2).tolist() == [False, False, False]  # on its way back
    assert not masks.dppo_tv(moved, mu, 0 * worth, threshold=0.2).any()
    assert masks.geometric_sequence(logs(2.0, 0.5, 1.2), TWO, low=0.9, high=1.1).tolist() == [False, False, True]
    assert masks.k3(logs(2.0, 0.5, 1.1), TWO, threshold=0.1).tolist() == [True, True, False]  # no cancelling out
    left = masks.opsm(logs(0.4, 0.4, 0.4), logs(0.5, 0.5, 0.5), torch.tensor([-1.0, -1.0, 1.0]), TWO, delta=0.1)
    assert left.tolist() == [True, True, False]
    assert masks.truncated(torch.tensor([False, True]), TWO).tolist() == [False, False, True]
    assert masks.token_age(torch.tensor([0, 2, 3]), max_age=2).tolist() == [False, False, True]


def slope(surrogate: Any, ratio: float, advantage: float, **keys: float) -> tuple[float, bool]:
    logprob = torch.tensor([math.log(ratio) - 1.0], requires_grad=True)
    out = surrogate(logprob, torch.tensor([-1.0]), torch.tensor([advantage]), **keys)
    (gradient,) = torch.autograd.grad(out.loss.sum(), logprob)
    return gradient.item(), bool(out.clipped)


def test_cispo_keeps_the_gradient_that_the_clip_of_ppo_takes() -> None:
    keys = {"epsilon": 0.2, "epsilon_high": 0.28}
    assert slope(ppo_clip, 1.5, 2.0, **keys) == (0.0, True)
    assert slope(cispo, 1.5, 2.0, **keys) == (pytest.approx(-2.56), True)
    assert slope(cispo, 1.1, 2.0, **keys) == (pytest.approx(-2.2), False)
    assert slope(cispo, 0.1, 2.0, epsilon=1.0, epsilon_high=4.0) == (pytest.approx(-0.2), False)


def test_the_dual_clip_bounds_what_a_bad_token_that_became_probable_pulls() -> None:
    keys = {"epsilon": 0.2, "epsilon_high": 0.28}
    assert slope(ppo_clip, 5.0, -2.0, **keys) == (pytest.approx(10.0, rel=1e-5), False)
    assert slope(ppo_clip, 5.0, -2.0, **keys, dual_clip=3.0) == (0.0, True)
    assert slope(ppo_clip, 2.0, -2.0, **keys, dual_clip=3.0) == (pytest.approx(4.0, rel=1e-5), False)


def test_gspo_clips_an_answer_as_a_whole() -> None:
    """Ratios 2 and 1/2 are an answer that did not move; their tokens' gradients are 1/2 of the answer's each."""
    lp = logs(0.4, 0.1, 0.3).requires_grad_()
    out = gspo(lp, logs(0.2, 0.2, 0.2), torch.ones(3), TWO, epsilon=0.1, epsilon_high=0.1)
    assert out.clipped.tolist() == [False, False, True]
    (gradient,) = torch.autograd.grad(out.loss[:2].mean(), lp)
    torch.testing.assert_close(gradient, torch.tensor([-0.5, -0.5, 0.0]))


def test_divergences_by_hand_pull_towards_the_policy_that_sampled() -> None:
    """log r = 0.5: Schulman's three numbers, and their slopes."""
    for estimator, value, gradient in (("k1", -0.5, -1.0), ("k2", 0.125, 0.5), ("k3", 0.1487213, 0.6487213)):
        lp = torch.tensor([-1.0], requires_grad=True)
        found = kl_to_behaviour(lp, torch.tensor([-1.5]), estimator=estimator)
        found.sum().backward()
        assert found.item() == pytest.approx(value, abs=1e-6)
        assert lp.grad is not None
        assert lp.grad.item() == pytest.approx(gradient, abs=1e-6)


PARTS = {
    **{preset: Objective(preset=preset) for preset in get_args(Preset)},
    **{
        weight.type: Objective(preset="grpo", surrogate="reinforce", importance_weight=weight)
        for weight in (NoWeight(), TokenTis(), TokenIcepop(), SequenceTis(), SequenceMis(), GeometricWeight())
    },
    **{mask.type: Objective(preset="grpo", mask=[mask]) for mask in (DppoTv(), GeometricSequence(), K3Mask(), Opsm())},
    **{
        estimator: Objective(preset="grpo", anchor=BehaviourKl(estimator=estimator)) for estimator in ("k1", "k2", "k3")
    },
    "dual": Objective(preset="grpo", dual_clip=10.0),
}


@pytest.mark.parametrize("objective", PARTS.values(), ids=list(PARTS))
def test_a_ratio_of_e_to_the_fifty_has_a_finite_loss_and_gradient(objective: Objective) -> None:
    for advantage in (1.0, -1.0):
        current = torch.tensor([-1.0, -51.0, -1.0], requires_grad=True)
        behaviour = torch.tensor([-51.0, -1.0, -1.0])
        terms = terms_of(objective, current, behaviour, behaviour, torch.full((3,), advantage), TWO)
        (gradient,) = torch.autograd.grad(terms.loss.sum(), current)
        assert torch.isfinite(terms.loss).all()
        assert torch.isfinite(gradient).all()
        assert torch.isfinite(terms.ratio).all()


@pytest.mark.parametrize("objective", PARTS.values(), ids=list(PARTS))
def test_at_age_zero_every_objective_is_the_policy_gradient(objective: Objective) -> None:
    """Ratio 1: no weight, no clip and no mask, and but for k1, whose expectation it is, no anchor."""
    logprob = logs(0.2, 0.5, 0.3).requires_grad_()
    worth = torch.tensor([1.0, 1.0, -2.0])
    fresh = logprob.detach()
    terms = terms_of(objective, logprob, fresh, fresh, worth, TWO)
    loss = terms.loss
    if objective.surrogate == "gspo":
        loss = loss / torch.tensor([2.0, 2.0, 1.0])  # each token has its answer's loss
        worth = worth / torch.tensor([2.0, 2.0, 1.0])
    (gradient,) = torch.autograd.grad(loss.sum(), logprob)
    if objective.anchor == BehaviourKl(estimator="k1"):
        worth = worth + 1e-3
    torch.testing.assert_close(gradient, -worth)
    assert not terms.masked.any()
    assert not terms.cut.any()
    assert not terms.clipped.any()
