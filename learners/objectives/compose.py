"""The parts of an objective, put together for packed tokens: surrogate x weight x mask + anchors - entropy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.config.objective import (
    BehaviourKl,
    DppoTv,
    GeometricSequence,
    GeometricWeight,
    ImportanceWeight,
    K3Mask,
    Objective,
    Opsm,
    SequenceMis,
    SequenceTis,
    TokenAge,
    TokenIcepop,
    TokenTis,
    TruncatedMask,
)
from asyncrl.learners.objectives import masks, weights
from asyncrl.learners.objectives.anchors import kl_to_behaviour, kl_to_reference
from asyncrl.learners.objectives.cispo import cispo
from asyncrl.learners.objectives.gspo import gspo
from asyncrl.learners.objectives.ppo_clip import ppo_clip
from asyncrl.learners.objectives.ratio import ratio_of
from asyncrl.learners.objectives.reinforce import reinforce
from asyncrl.learners.objectives.sequences import Sequences
from asyncrl.learners.objectives.surrogate import Surrogate
from asyncrl.learners.objectives.weights import Weighted


@dataclass(frozen=True, slots=True)
class Terms:
    """Per token [N]. loss: to minimise, differentiable, finite at every token that is not masked.

    masked uint8: 0, or 1 + the place in `masks.NAMES` of the mask that took the token. ratio: pi / mu. clipped, cut: by
    the surrogate, and of the importance weight.
    """

    loss: Tensor
    masked: Tensor
    ratio: Tensor
    clipped: Tensor
    cut: Tensor


def known_masks(objective: Objective, ages: Tensor, truncated: Tensor, sequences: Sequences) -> Tensor:
    """uint8 [N], as `Terms.masked`: what the masks take that data decide. ages int [N]; truncated bool [R]."""
    found = torch.zeros(len(sequences.tokens), dtype=torch.uint8)
    for mask in objective.mask or ():
        if isinstance(mask, TruncatedMask):
            _take(found, mask.type, masks.truncated(truncated, sequences) & sequences.tokens)
        elif isinstance(mask, TokenAge):
            _take(found, mask.type, masks.token_age(ages, max_age=mask.max_age) & sequences.tokens)
    return found


def terms_of(
    objective: Objective,
    current: Tensor,
    behaviour: Tensor,
    anchor: Tensor,
    advantages: Tensor,
    sequences: Sequences,
    *,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
) -> Terms:
    """All parts, for tokens of whole sequences. current [N]: log-probs of the current weights, differentiable;
    behaviour [N]: of what sampled; anchor [N]: what the surrogate's ratio is taken to, the same or `proximal`;
    advantages [N]. reference [N]: log-probs of the reference, where `beta` is above 0; entropy [N]: of what the current
    weights would choose from, differentiable, where its coefficient is.

    sequences: with the tokens that are trained. The others hold finite numbers, and what is said of them means nothing.
    """
    surrogate = _surrogate(objective, current, anchor, advantages, sequences)
    log_total = (current - behaviour).detach()
    # What the weight and the masks for mismatch measure: all there is, or where it was told apart the engine's share,
    # so that bounds meant for rounding do not fire on age.
    log_origin = anchor - behaviour if objective.proximal == "behaviour-version" else log_total
    weighted = _weighted(objective.importance_weight, log_origin, sequences)
    loss = weighted.weight * surrogate.loss
    if isinstance(objective.anchor, BehaviourKl):
        divergence = kl_to_behaviour(current, behaviour, estimator=objective.anchor.estimator)
        loss = loss + objective.anchor.coefficient * divergence
    if objective.beta:
        assert reference is not None
        loss = loss + objective.beta * kl_to_reference(
            current, behaviour, reference, estimator=objective.beta_estimator
        )
    if objective.entropy:
        # Without the ratio: an entropy is of the whole distribution, not of the token that came, whose ratio has the
        # mean 1 whatever the entropy. It would add variance and correct nothing.
        assert entropy is not None
        loss = loss - objective.entropy * entropy
    masked = torch.zeros(len(current), dtype=torch.uint8, device=current.device)
    for mask in objective.mask or ():
        match mask:
            case DppoTv():
                taken = masks.dppo_tv(current, behaviour, advantages, threshold=mask.threshold)
            case GeometricSequence():
                taken = masks.geometric_sequence(log_origin, sequences, low=mask.low, high=mask.high)
            case K3Mask():
                taken = masks.k3(log_origin, sequences, threshold=mask.threshold)
            case Opsm():
                taken = masks.opsm(current, behaviour, advantages, sequences, delta=mask.delta)
            case _:
                continue  # see `known_masks`
        _take(masked, mask.type, taken & sequences.tokens)
    return Terms(
        loss=loss,
        masked=masked,
        ratio=ratio_of(anchor - behaviour) * surrogate.ratio,
        clipped=surrogate.clipped,
        cut=weighted.cut,
    )


def _surrogate(
    objective: Objective, current: Tensor, anchor: Tensor, advantages: Tensor, sequences: Sequences
) -> Surrogate:
    if objective.surrogate == "reinforce":
        return reinforce(current, anchor, advantages)
    assert objective.epsilon is not None
    assert objective.epsilon_high is not None
    low, high = objective.epsilon, objective.epsilon_high
    if objective.surrogate == "cispo":
        return cispo(current, anchor, advantages, epsilon=low, epsilon_high=high)
    if objective.surrogate == "gspo":
        return gspo(current, anchor, advantages, sequences, epsilon=low, epsilon_high=high)
    return ppo_clip(current, anchor, advantages, epsilon=low, epsilon_high=high, dual_clip=objective.dual_clip)


def _weighted(weight: ImportanceWeight | None, log_ratio: Tensor, sequences: Sequences) -> Weighted:
    match weight:
        case TokenTis():
            return weights.token_tis(log_ratio, cap=weight.cap)
        case TokenIcepop():
            return weights.token_icepop(log_ratio, low=weight.low, high=weight.high)
        case SequenceTis():
            return weights.sequence_tis(log_ratio, sequences, cap=weight.cap)
        case SequenceMis():
            return weights.sequence_mis(log_ratio, sequences, low=weight.low, high=weight.high)
        case GeometricWeight():
            return weights.geometric(log_ratio, sequences, cap=weight.cap)
        case _:
            return weights.no_weight(log_ratio)


def _take(masked: Tensor, name: str, taken: Tensor) -> None:
    """Mark the tokens that no other mask took before."""
    masked[taken & (masked == 0)] = 1 + masks.NAMES.index(name)
