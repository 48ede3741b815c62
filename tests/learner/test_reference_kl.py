"""KL to a reference and the entropy bonus, in expectation over all answers of a toy policy: what has a bias and what
has none, whatever sampled the tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from asyncrl.config.objective import NoWeight, Objective
from asyncrl.learners.objectives.anchors import kl_to_reference
from asyncrl.learners.objectives.ratio import LOG_RATIO_LIMIT

LAGS = (0, 1, 2, 4, 8)
ESTIMATORS = ("k1", "k2", "k3")
FAR = 12.0  # how old the reference is: older than anything that sampled


def expected(toy: ModuleType, objective: Objective, lag: float) -> Tensor:
    """Over all answers that weights `lag` versions old give: the mean gradient of the sum of an answer's losses."""
    logits, old = toy.policy(3).requires_grad_(), toy.policy(3, lag)
    total = torch.zeros_like(logits)
    for text, chance in zip(toy.ANSWERS, toy.chances(old), strict=True):
        mu = [toy.logprobs_of(old, text)]
        one = toy.Answers(logits, [text], mu, mu, [[0] * len(text)], [0.0], [0], [False], reference=toy.policy(3, FAR))
        total += chance * toy.LONGEST * toy.gradient(objective, one)
    return total


def only(**keys: object) -> Objective:
    """An objective without a policy gradient, summed over an answer's tokens: advantages are 0."""
    return Objective(preset="grpo", surrogate="reinforce", importance_weight=NoWeight(), aggregation="constant", **keys)  # type: ignore[arg-type]


def over_prefixes(
    toy: ModuleType, lag: float, of_prefix: Callable[[Tensor, Tensor], Tensor], *, far: float = FAR
) -> tuple[Tensor, Tensor]:
    """The sum over prefixes of how often weights `lag` versions old come by, times `of_prefix` of the current policy's
    log-probs there and the reference's, [3] each; and its gradient."""
    logits, old = toy.policy(3).requires_grad_(), toy.policy(3, lag)
    now, reference = (torch.log_softmax(z, 1) for z in (logits, toy.policy(3, far)))
    value = torch.zeros((), dtype=torch.float64)
    for prefix, n in toy.PREFIXES.items():
        reached = toy.logprobs_of(old, prefix).sum().exp() if prefix else 1.0
        value = value + reached * of_prefix(now[n], reference[n])
    (gradient,) = torch.autograd.grad(value, logits)
    return value.detach(), gradient


def divergence(now: Tensor, reference: Tensor) -> Tensor:
    return (now.exp() * (now - reference)).sum()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("lag", LAGS)
def test_every_estimator_has_the_gradient_of_the_divergence_whatever_sampled(
    toy: ModuleType, estimator: str, lag: int
) -> None:
    found = expected(toy, only(beta=1.0, beta_estimator=estimator), lag)
    _, truth = over_prefixes(toy, lag, divergence)
    torch.testing.assert_close(found, truth, atol=1e-10, rtol=0)
    assert truth.abs().max() > 1e-2


def estimate(toy: ModuleType, estimator: str, lag: float, *, far: float = FAR) -> Tensor:
    """The mean over answers of the sum of the estimates at an answer's tokens."""
    policies = [toy.policy(3, n) for n in (0, lag, far)]
    old = policies[1]
    return sum(
        chance * kl_to_reference(*(toy.logprobs_of(z, text) for z in policies), estimator=estimator).sum()
        for text, chance in zip(toy.ANSWERS, toy.chances(old), strict=True)
    )


@pytest.mark.parametrize("lag", LAGS)
def test_k1_and_k3_have_its_value_and_k2_to_second_order(toy: ModuleType, lag: int) -> None:
    truth, _ = over_prefixes(toy, lag, divergence)
    for estimator in ESTIMATORS:
        found = estimate(toy, estimator, lag)
        if estimator == "k2":
            assert float((found - truth).abs() / truth) > 0.05
        else:
            torch.testing.assert_close(found, truth, atol=1e-10, rtol=0)


def test_the_bias_of_k2s_value_vanishes_faster_than_the_divergence(toy: ModuleType) -> None:
    def bias(far: float) -> float:
        truth, _ = over_prefixes(toy, 2, divergence, far=far)
        return float((estimate(toy, "k2", 2, far=far) - truth).abs() / truth)

    assert bias(0.1) < bias(1.0) / 5


@pytest.mark.parametrize(("policy", "reference", "steadier"), [(0.6, 0.5, "k3"), (0.9998, 0.5, "k1")])
def test_k3s_value_varies_less_until_the_policy_is_much_surer_than_the_reference(
    policy: float, reference: float, steadier: str
) -> None:
    """Which is where reinforcement learning leads, and why the metric is k1."""
    p, ref = (torch.tensor([sure, 1 - sure], dtype=torch.float64) for sure in (policy, reference))
    variance = {}
    for estimator in ("k1", "k3"):
        values = kl_to_reference(p.log(), p.log(), ref.log(), estimator=estimator)
        variance[estimator] = float((p * values**2).sum() - (p * values).sum() ** 2)
    assert min(variance, key=lambda estimator: variance[estimator]) == steadier
    assert max(variance.values()) > 10 * min(variance.values())


NAIVE: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda x: x,
    "k2": lambda x: x**2 / 2,
    "k3": lambda x: torch.exp(-x) - 1 + x,
}


def naive(toy: ModuleType, estimator: str, lag: float) -> Tensor:
    """The expected gradient of the same estimators without the ratio: what the tokens of mu are not corrected for."""
    logits, old = toy.policy(3).requires_grad_(), toy.policy(3, lag)
    value = sum(
        chance * NAIVE[estimator](toy.logprobs_of(logits, text) - toy.logprobs_of(toy.policy(3, FAR), text)).sum()
        for text, chance in zip(toy.ANSWERS, toy.chances(old), strict=True)
    )
    (gradient,) = torch.autograd.grad(value, logits)
    return gradient


def test_without_the_ratio_all_are_biased_off_policy_and_on_policy_all_but_k2(toy: ModuleType) -> None:
    """Negative control. On-policy k1 has no gradient at all, and k3 that of the divergence the other way round."""
    for lag in (0, 2):
        _, truth = over_prefixes(toy, lag, divergence)
        for estimator in ESTIMATORS:
            apart = float((naive(toy, estimator, lag) - truth).norm() / truth.norm())
            assert apart < 1e-10 if (lag, estimator) == (0, "k2") else apart > 0.05
    torch.testing.assert_close(naive(toy, "k1", 0), torch.zeros(7, 3, dtype=torch.float64), atol=1e-10, rtol=0)
    _, reverse = over_prefixes(toy, 0, lambda now, ref: (ref.exp() * (ref - now)).sum())
    torch.testing.assert_close(naive(toy, "k3", 0), reverse, atol=1e-10, rtol=0)


def variance(toy: ModuleType, objective: Objective, lag: float, *, far: float) -> float:
    """Of the gradient of one answer's sum of losses, over all answers that weights `lag` versions old give."""
    logits, old = toy.policy(3).requires_grad_(), toy.policy(3, lag)
    mean, square = torch.zeros_like(logits), 0.0
    for text, chance in zip(toy.ANSWERS, toy.chances(old), strict=True):
        mu = [toy.logprobs_of(old, text)]
        one = toy.Answers(logits, [text], mu, mu, [[0] * len(text)], [0.0], [0], [False], reference=toy.policy(3, far))
        gradient = toy.gradient(objective, one)
        mean += chance * gradient
        square += float(chance * gradient.square().sum())
    return square - float(mean.square().sum())


def test_near_the_reference_k1_has_the_most_variance_and_k3_that_of_k2(toy: ModuleType) -> None:
    found = {k: variance(toy, only(beta=1.0, beta_estimator=k), 2, far=3) for k in ESTIMATORS}
    assert found["k1"] > 2 * found["k3"]
    assert found["k2"] == pytest.approx(found["k3"], rel=1e-9)


@pytest.mark.parametrize("lag", LAGS)
def test_the_bonus_has_the_gradient_of_the_entropy_whatever_sampled(toy: ModuleType, lag: int) -> None:
    """Of what the prefixes that were sampled go on to, minus since the loss is minimised; no ratio is needed."""
    found = expected(toy, only(entropy=1.0), lag)
    _, truth = over_prefixes(toy, lag, lambda now, _: -(now.exp() * now).sum())
    torch.testing.assert_close(found, -truth, atol=1e-10, rtol=0)
    assert truth.abs().max() > 1e-2


def test_minus_the_log_prob_of_what_came_has_the_value_of_the_entropy_and_no_gradient(toy: ModuleType) -> None:
    """Why the bonus is not an estimate."""
    logits = toy.policy(3).requires_grad_()
    value = sum(
        -chance * toy.logprobs_of(logits, text).sum()
        for text, chance in zip(toy.ANSWERS, toy.chances(logits.detach()), strict=True)
    )
    truth, _ = over_prefixes(toy, 0, lambda now, _: -(now.exp() * now).sum())
    torch.testing.assert_close(value.detach(), truth, atol=1e-10, rtol=0)
    (gradient,) = torch.autograd.grad(value, logits)
    torch.testing.assert_close(gradient, torch.zeros_like(logits), atol=1e-10, rtol=0)


def test_a_ratio_on_the_bonus_would_change_nothing_but_its_variance(toy: ModuleType) -> None:
    """Given the prefix, the ratio has the mean 1 whatever the entropy."""
    logits, old = toy.policy(3).requires_grad_(), toy.policy(3, 4)
    plain, weighed = torch.zeros_like(logits), torch.zeros_like(logits)
    squares = [0.0, 0.0]
    for text, chance in zip(toy.ANSWERS, toy.chances(old), strict=True):
        entropy, ratio = (
            toy.entropies_of(logits, text),
            (toy.logprobs_of(logits, text) - toy.logprobs_of(old, text)).exp(),
        )
        for n, (total, factor) in enumerate(((plain, 1.0), (weighed, ratio.detach()))):
            (gradient,) = torch.autograd.grad((factor * entropy).sum(), logits, retain_graph=True)
            total += chance * gradient
            squares[n] += float(chance * gradient.square().sum())
    torch.testing.assert_close(weighed, plain, atol=1e-10, rtol=0)
    assert squares[1] > 1.1 * squares[0]


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    # r = 2, x = log 4
    [
        ("k1", 2 * math.log(4), 2 * (math.log(4) + 1)),
        ("k2", math.log(4) ** 2, 2 * math.log(4)),
        ("k3", 1.2725887, 2.7725887),
    ],
)
def test_values_and_slopes_by_hand(estimator: str, value: float, slope: float) -> None:
    logprob = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    found = kl_to_reference(
        logprob, logprob.detach() - math.log(2), logprob.detach() - math.log(4), estimator=estimator
    )
    (gradient,) = torch.autograd.grad(found.sum(), logprob)
    assert found.item() == pytest.approx(value)
    assert gradient.item() == pytest.approx(slope)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_at_the_reference_it_is_exactly_nothing_and_absurd_numbers_stay_finite(estimator: str) -> None:
    logprob = torch.tensor([-1.5, -500.0, 0.0, -3.0], requires_grad=True)
    behaviour = torch.tensor([-1.0, 0.0, -500.0, -3.0])
    reference = torch.tensor([-1.5, -1.0, -1.0, -90.0])
    found = kl_to_reference(logprob, behaviour, reference, estimator=estimator)
    (gradient,) = torch.autograd.grad(found.sum(), logprob)
    assert torch.isfinite(found).all()
    assert torch.isfinite(gradient).all()
    assert found[0].item() == 0.0
    assert gradient[1] == gradient[2] == 0.0  # a ratio that only a broken number has
    assert estimator == "k1" or float(gradient[0]) == 0.0
    assert float(gradient[3]) == pytest.approx(LOG_RATIO_LIMIT + (estimator == "k1"))
