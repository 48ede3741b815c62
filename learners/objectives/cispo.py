"""CISPO: the ratio is clipped as a weight, and every token keeps its gradient (MiniMax-M1, arXiv 2506.13585)."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.learners.objectives.ratio import ratio_of
from asyncrl.learners.objectives.surrogate import Surrogate


def cispo(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, *, epsilon: float, epsilon_high: float) -> Surrogate:
    """-sg(clip(r, 1 - epsilon, 1 + epsilon_high)) A logprobs, sg: without a gradient. Arguments as of `ppo_clip`."""
    ratio = ratio_of(logprobs - behaviour).detach()
    weight = torch.clamp(ratio, 1 - epsilon, 1 + epsilon_high)
    return Surrogate(loss=-weight * advantages * logprobs, ratio=ratio, clipped=weight != ratio)
