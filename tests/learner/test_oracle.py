"""Every preset and part against autograd of its formula, written again answer by answer, and against expectations over
all answers of a toy policy."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import ModuleType
from typing import Any, get_args

import numpy as np
import pytest
import torch
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
    TokenAge,
    TokenIcepop,
    TokenTis,
    TruncatedMask,
)
from asyncrl.learners.advantages import advantages

LAGS = (0, 1, 2, 4, 8)
WEIGHTS = (NoWeight(), TokenTis(cap=1.1), TokenIcepop(low=0.8, high=1.3), SequenceTis(cap=1.2))
WEIGHTS += (SequenceMis(low=0.7, high=1.5), GeometricWeight(cap=1.1))
MASKS = (DppoTv(threshold=0.03), GeometricSequence(low=0.9, high=1.1), K3Mask(threshold=0.01), Opsm(delta=0.02))
MASKS += (TruncatedMask(), TokenAge(max_age=1))
OBJECTIVES: dict[str, Objective] = {
    **{preset: Objective(preset=preset) for preset in get_args(Preset)},
    **{f"weight {w.type}": Objective(preset="grpo", surrogate="reinforce", importance_weight=w) for w in WEIGHTS},
    **{
        f"weight {w.type} of two": Objective(preset="grpo", proximal="behaviour-version", importance_weight=w)
        for w in WEIGHTS
    },
    **{f"mask {m.type}": Objective(preset="grpo", mask=[m]) for m in MASKS},
    **{f"mask {m.type}, by answer": Objective(preset="grpo", mask=[m], aggregation="sequence") for m in MASKS},
    **{f"mask {m.type} of two": Objective(preset="grpo", proximal="behaviour-version", mask=[m]) for m in MASKS},
    **{
        f"kl {k}": Objective(preset="grpo", anchor=BehaviourKl(coefficient=0.3, estimator=k))
        for k in ("k1", "k2", "k3")
    },
    **{f"by {a}": Objective(preset="grpo", aggregation=a) for a in ("token", "sequence", "prompt", "constant")},
    **{f"beta {k}": Objective(preset="grpo", beta=0.3, beta_estimator=k) for k in ("k1", "k2", "k3")},
    "entropy": Objective(preset="grpo", entropy=0.2),
    "beta and entropy of async": Objective(preset="async", beta=0.2, entropy=0.1),
    "prompt, masked": Objective(preset="grpo", aggregation="prompt", mask=[TruncatedMask(), TokenAge(max_age=2)]),
    "dual clip": Objective(preset="grpo", dual_clip=1.3),
    "wide gspo": Objective(preset="gspo", epsilon=0.1, epsilon_high=0.1),
    "narrow cispo": Objective(preset="cispo", epsilon=0.1, epsilon_high=0.1),
}


def enumerated(objective: Objective, answers: Any, longest: int, logprobs_of: Any) -> Tensor:
    """The gradient of the objective, from its formulas: a loop over answers and their tokens, numbers decide."""
    losses: list[list[Tensor]] = []
    for row, text in enumerate(answers.texts):
        lp, mu, a = logprobs_of(answers.logits, text), answers.behaviour[row], answers.advantages[row]
        two = objective.proximal == "behaviour-version"
        base = answers.proximal[row] if two else mu
        r = torch.exp(lp - base)
        origin = [float(x) for x in ((base - mu) if two else (lp.detach() - mu))]
        kept = [True] * len(text)
        for mask in objective.mask or ():
            moved = [math.exp(float(p)) - math.exp(float(m)) for p, m in zip(lp.detach(), mu, strict=True)]
            mean = sum(origin) / len(origin)
            if isinstance(mask, DppoTv):
                gone = [(a > 0 and d > mask.threshold) or (a < 0 and d < -mask.threshold) for d in moved]
            elif isinstance(mask, GeometricSequence):
                gone = [not mask.low <= math.exp(mean) <= mask.high] * len(text)
            elif isinstance(mask, K3Mask):
                gone = [sum(math.exp(x) - 1 - x for x in origin) / len(text) > mask.threshold] * len(text)
            elif isinstance(mask, Opsm):
                gone = [a < 0 and float((mu - lp.detach()).mean()) > mask.delta] * len(text)
            elif isinstance(mask, TruncatedMask):
                gone = [text[-1] != 0] * len(text)
            else:
                gone = [age > mask.max_age for age in answers.ages[row]]
            kept = [k and not g for k, g in zip(kept, gone, strict=True)]
        own: list[Tensor] = []
        for t in range(len(text)):
            w, whole = math.exp(origin[t]), math.exp(sum(origin))
            weight = objective.importance_weight
            if isinstance(weight, NoWeight):
                u = 1.0
            elif isinstance(weight, TokenTis):
                u = min(w, weight.cap)
            elif isinstance(weight, TokenIcepop):
                u = w if weight.low <= w <= weight.high else 0.0
            elif isinstance(weight, SequenceTis):
                u = min(whole, weight.cap)
            elif isinstance(weight, SequenceMis):
                u = whole if weight.low <= whole <= weight.high else 0.0
            else:
                assert isinstance(weight, GeometricWeight)
                u = min(whole ** (1 / len(text)), weight.cap)
            if objective.surrogate == "reinforce":
                term = a * lp[t]
            else:
                low, high = 1 - (objective.epsilon or 0), 1 + (objective.epsilon_high or 0)
                s = torch.exp((lp - base).mean()) if objective.surrogate == "gspo" else r[t]
                if objective.surrogate == "cispo":
                    term = min(max(float(s.detach()), low), high) * a * lp[t]
                else:
                    term = torch.minimum(s * a, s.clamp(low, high) * a)
                    if objective.dual_clip is not None and a < 0:
                        term = torch.maximum(term, torch.tensor(objective.dual_clip * a, dtype=term.dtype))
            loss = -u * term
            if isinstance(objective.anchor, BehaviourKl):
                x = lp[t] - mu[t]
                kl = {"k1": -x, "k2": x * x / 2, "k3": torch.exp(x) - 1 - x}[objective.anchor.estimator]
                loss = loss + objective.anchor.coefficient * kl
            if objective.beta:
                ratio, x = torch.exp(lp[t] - mu[t]), lp[t] - logprobs_of(answers.reference, text)[t]
                kl = {"k1": ratio * x, "k2": ratio.detach() * x * x / 2, "k3": ratio * (torch.exp(-x) - 1 + x)}
                loss = loss + objective.beta * kl[objective.beta_estimator]
            if objective.entropy:
                p = torch.stack([logprobs_of(answers.logits, (*text[:t], v))[t].exp() for v in range(3)])
                loss = loss + objective.entropy * (p * p.log()).sum()
            if kept[t]:
                own.append(loss)
        losses.append(own)
    zero = 0 * answers.logits.sum()
    of_group: dict[int, list[Tensor]] = {}
    for row, own in enumerate(losses):
        of_group.setdefault(answers.groups[row], []).extend(own)
    if objective.aggregation == "prompt":
        means = [torch.stack(group).mean() for group in of_group.values() if group]
    elif objective.aggregation == "sequence":
        means = [torch.stack(own).mean() for own in losses if own]
    elif objective.aggregation == "constant":
        means = [torch.stack(own).sum() / longest for own in losses if own]
    else:
        means = [loss for own in losses for loss in own]
    (found,) = torch.autograd.grad(sum(means, zero) / max(1, len(means)), answers.logits)
    return found


@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_is_that_of_the_formula(toy: ModuleType, name: str, lag: int) -> None:
    answers = toy.every_answer(7, lag)
    expected = enumerated(OBJECTIVES[name], answers, toy.LONGEST, toy.logprobs_of)
    torch.testing.assert_close(toy.gradient(OBJECTIVES[name], answers), expected, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_neither_portions_nor_their_order_change_the_gradient(toy: ModuleType, name: str) -> None:
    """Control: with a denominator for each portion they do."""
    answers = toy.every_answer(7, 2)
    whole = toy.gradient(OBJECTIVES[name], answers)
    shuffled = replace(answers, order=np.random.default_rng(1).permutation(len(answers.texts)).tolist())
    for portions in (1, 3, 15):
        torch.testing.assert_close(
            toy.gradient(OBJECTIVES[name], shuffled, portions=portions), whole, atol=1e-12, rtol=0
        )
    local = toy.gradient(OBJECTIVES[name], shuffled, portions=4, local=True)
    assert not torch.allclose(local, whole, atol=1e-6)


@pytest.mark.parametrize("part", [*WEIGHTS[1:], *MASKS], ids=lambda part: part.type)
def test_each_part_does_something_and_not_everything(toy: ModuleType, part: Any) -> None:
    """So that the comparisons above are not between two ways of doing nothing."""
    answers = toy.every_answer(7, 2)
    masks = part in MASKS
    plain = Objective(preset="grpo", surrogate="reinforce", importance_weight=NoWeight())
    with_part = Objective(
        preset="grpo",
        surrogate="reinforce",
        importance_weight=NoWeight() if masks else part,
        mask=[part] if masks else [],
    )
    found, without = toy.gradient(with_part, answers), toy.gradient(plain, answers)
    assert found.abs().max() > 1e-3
    assert (found - without).abs().max() > 1e-3


# --- expectations -----------------------------------------------------------------------------------------------------


def rewards_of(toy: ModuleType) -> Tensor:
    """[15], of each answer."""
    order = torch.randperm(len(toy.ANSWERS), generator=torch.Generator().manual_seed(5))
    return torch.linspace(-1, 1, len(toy.ANSWERS), dtype=torch.float64)[order]


def improvement(toy: ModuleType, logits: Tensor, rewards: Tensor) -> Tensor:
    """The gradient of the expected reward, by all answers."""
    (found,) = torch.autograd.grad((toy.chances(logits) * rewards).sum(), logits)
    return found


def expected(toy: ModuleType, objective: Objective, lag: float, *, kind: str, members: int) -> tuple[Tensor, Tensor]:
    """Over all groups of `members` answers that weights `lag` versions old may give: minus the mean gradient of the sum
    of their losses, per member; and the gradient of the expected reward."""
    logits, old = toy.policy(3).requires_grad_(), toy.policy(3, lag)
    rewards = rewards_of(toy)
    chance, mu = toy.chances(old), [toy.logprobs_of(old, text) for text in toy.ANSWERS]
    total = torch.zeros_like(logits)
    for group in itertools.product(range(len(toy.ANSWERS)), repeat=members):
        r = rewards[list(group)].numpy()
        worth = r if kind == "raw" else advantages(r, np.zeros(members, np.int64), kind).values  # type: ignore[arg-type]
        answers = toy.Answers(
            logits=logits,
            texts=[toy.ANSWERS[n] for n in group],
            behaviour=[mu[n] for n in group],
            proximal=[mu[n] for n in group],
            ages=[[0] * len(toy.ANSWERS[n]) for n in group],
            advantages=worth.tolist(),
            groups=[0] * members,
            truncated=[False] * members,
        )
        # `constant`: the sum of an answer's losses / LONGEST, and the mean over answers: linear in the answers.
        found = toy.LONGEST * toy.gradient(objective, answers)
        total -= chance[list(group)].prod() * found
    return total, improvement(toy, logits, rewards)


def reinforce_with(weight: Any) -> Objective:
    return Objective(preset="grpo", surrogate="reinforce", importance_weight=weight, aggregation="constant")


EXACT = SequenceTis(cap=1e6)


@pytest.mark.parametrize("lag", LAGS)
def test_whole_answers_weighed_without_a_cap_have_no_bias_at_any_lag(toy: ModuleType, lag: int) -> None:
    """Control: without the weight, the expectation is another wherever the weights have moved."""
    found, truth = expected(toy, reinforce_with(EXACT), lag, kind="raw", members=1)
    torch.testing.assert_close(found, truth, atol=1e-10, rtol=0)
    uncorrected, _ = expected(toy, reinforce_with(NoWeight()), lag, kind="raw", members=1)
    apart = float((uncorrected - truth).abs().max())
    assert apart < 1e-10 if lag == 0 else apart > 1e-3


def test_a_baseline_of_the_others_leaves_it_unbiased_and_one_with_itself_shrinks_it(toy: ModuleType) -> None:
    """Also off-policy. The mean of a group with the answer itself in it takes (n - 1) / n of the gradient."""
    found, truth = expected(toy, reinforce_with(EXACT), 2, kind="leave-one-out", members=2)
    torch.testing.assert_close(found, truth, atol=1e-10, rtol=0)
    shrunk, _ = expected(toy, reinforce_with(EXACT), 2, kind="group-mean", members=2)
    torch.testing.assert_close(shrunk, truth / 2, atol=1e-10, rtol=0)


def test_a_cap_has_the_bias_of_the_answers_that_it_cuts(toy: ModuleType) -> None:
    """The expectation is the sum over answers of min(pi, cap mu) R grad log pi, exactly."""
    cap = 1.1
    found, truth = expected(toy, reinforce_with(SequenceTis(cap=cap)), 2, kind="raw", members=1)
    logits = toy.policy(3).requires_grad_()
    rewards = rewards_of(toy)
    pi, mu = toy.chances(logits), toy.chances(toy.policy(3, 2))
    value = (torch.minimum(pi.detach(), cap * mu) * rewards * pi.log()).sum()
    (stated,) = torch.autograd.grad(value, logits)
    torch.testing.assert_close(found, stated, atol=1e-10, rtol=0)
    assert (found - truth).abs().max() > 1e-3


def test_weights_of_tokens_have_the_bias_of_the_prefixes_that_were_sampled(toy: ModuleType) -> None:
    """Each token is corrected, how often its prefix comes up is not: exact for answers' first tokens only if rewards do
    not depend on what follows. An unclipped PPO ratio is the same estimator, gradient for gradient."""
    found, truth = expected(toy, reinforce_with(TokenTis(cap=1e6)), 2, kind="raw", members=1)
    assert (found - truth).abs().max() > 1e-3
    wide = Objective(preset="grpo", epsilon=1.0, epsilon_high=1e6, aggregation="constant")
    clipped, _ = expected(toy, wide, 2, kind="raw", members=1)
    torch.testing.assert_close(clipped, found, atol=1e-10, rtol=0)
    fresh, true_fresh = expected(toy, reinforce_with(TokenTis(cap=1e6)), 0, kind="raw", members=1)
    torch.testing.assert_close(fresh, true_fresh, atol=1e-10, rtol=0)


def anchored(toy: ModuleType, estimator: str, lag: float) -> tuple[Tensor, Tensor]:
    """Over answers of mu: the expected gradient of an answer's sum of the estimator, and that of KL(mu || pi)."""
    logits, old = toy.policy(3).requires_grad_(), toy.policy(3, lag)
    objective = Objective(
        preset="grpo",
        surrogate="reinforce",
        importance_weight=NoWeight(),
        aggregation="constant",
        anchor=BehaviourKl(coefficient=1.0, estimator=estimator),  # type: ignore[arg-type]
    )
    total = torch.zeros_like(logits)
    for text, chance in zip(toy.ANSWERS, toy.chances(old), strict=True):
        mu = [toy.logprobs_of(old, text)]
        one = toy.Answers(logits, [text], mu, mu, [[0] * len(text)], [0.0], [0], [False])
        total += chance * toy.LONGEST * toy.gradient(objective, one)
    mu = toy.chances(old)
    (truth,) = torch.autograd.grad((mu * (mu.log() - toy.chances(logits).log())).sum(), logits)
    return total, truth


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("lag", LAGS)
def test_the_anchor_has_the_gradient_of_the_divergence(toy: ModuleType, estimator: str, lag: int) -> None:
    found, truth = anchored(toy, estimator, lag)
    torch.testing.assert_close(found, truth, atol=1e-10, rtol=0)
    assert lag == 0 or truth.abs().max() > 1e-3


def test_k2_has_it_to_first_order_in_how_far_the_weights_moved(toy: ModuleType) -> None:
    def error(lag: float) -> float:
        found, truth = anchored(toy, "k2", lag)
        return float((found - truth).norm() / truth.norm())

    assert error(1) > 1e-3
    assert error(0.1) == pytest.approx(error(1) / 10, rel=0.3)
