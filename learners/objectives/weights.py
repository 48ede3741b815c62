"""Importance weights: where a sample came from, corrected by a factor without a gradient.

With w = p / q of the policy p that is meant over the policy q that sampled, E_q[w f] = E_p[f]. Of a token that follows
its prefix, w is the token's ratio, which corrects the token and not how often its prefix comes up; of a whole answer, w
is the product of its ratios, which has no bias and a variance that grows with length. Cutting large weights trades
variance for bias. A weight of 0 leaves its token in the denominator; what takes tokens out of both is a mask
(`masks.py`).

Everything in log space: a product over 32,000 tokens is a sum, cut before it is an exponent.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.learners.objectives.ratio import ratio_of
from asyncrl.learners.objectives.sequences import Sequences


class Weighted(NamedTuple):
    """Per token [N], detached. weight: for the loss. cut: the weight is not the ratio that it stands for."""

    weight: Tensor
    cut: Tensor


def no_weight(log_ratio: Tensor) -> Weighted:
    """1 everywhere. log_ratio [N]."""
    return Weighted(torch.ones_like(log_ratio).detach(), torch.zeros_like(log_ratio, dtype=torch.bool))


def token_tis(log_ratio: Tensor, *, cap: float) -> Weighted:
    """min(w_t, cap): truncated importance sampling (Ionides 2008; for language models Yao et al. 2025)."""
    ratio = ratio_of(log_ratio.detach())
    return Weighted(torch.clamp(ratio, max=cap), ratio > cap)


def token_icepop(log_ratio: Tensor, *, low: float, high: float) -> Weighted:
    """w_t inside [low, high], else 0 (IcePop, Ring-1T, arXiv 2510.18855)."""
    return _inside(ratio_of(log_ratio.detach()), low, high)


def sequence_tis(log_ratio: Tensor, sequences: Sequences, *, cap: float) -> Weighted:
    """min(W, cap) at each token of an answer, W the product of its ratios."""
    ratio = sequences.spread(ratio_of(sequences.sum(log_ratio.detach())))
    return Weighted(torch.clamp(ratio, max=cap), ratio > cap)


def sequence_mis(log_ratio: Tensor, sequences: Sequences, *, low: float, high: float) -> Weighted:
    """W inside [low, high], else 0 (masked importance sampling; Liu, Li et al. 2025, the default of TRL)."""
    return _inside(sequences.spread(ratio_of(sequences.sum(log_ratio.detach()))), low, high)


def geometric(log_ratio: Tensor, sequences: Sequences, *, cap: float) -> Weighted:
    """min(W^(1/T), cap) with T the answer's tokens: a measure of how far off an answer is, no unbiased weight."""
    ratio = sequences.spread(ratio_of(sequences.mean(log_ratio.detach())))
    return Weighted(torch.clamp(ratio, max=cap), ratio > cap)


def _inside(ratio: Tensor, low: float, high: float) -> Weighted:
    outside = (ratio < low) | (ratio > high)
    return Weighted(torch.where(outside, torch.zeros_like(ratio), ratio), outside)
