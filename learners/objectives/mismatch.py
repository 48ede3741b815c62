"""What the engine computed differently from the learner at equal weights, as an importance weight.

The record's log-probs are the engine's. Where the learner's own are known under the very weights that sampled a token,
pi_v, the ratio of the current policy to what was sampled from has two factors:

    pi / mu  =  (pi_v / mu)  x  (pi / pi_v)        mismatch of the engine  x  staleness

PPO clips how far training has moved, which is the second one; the first corrects where the sample came from and belongs
before the clip (decoupled objective: Hilton, Cobbe and Schulman 2021, arXiv 2110.00641; AReaL, arXiv 2505.24298).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.learners.objectives.ppo_clip import LOG_RATIO_LIMIT

MISMATCH_CAP = 2.0
"""Weights are truncated here. Their expectation is 1, so that what is far above comes from few tokens and says how the
engine rounds; verl, slime and SkyRL truncate this ratio at 2 as well (truncated importance sampling)."""


class Mismatch(NamedTuple):
    """Per token [N], detached. weight: for the loss, at most MISMATCH_CAP. ratio: pi_v / mu itself."""

    weight: Tensor
    ratio: Tensor


def mismatch(proximal: Tensor, behaviour: Tensor) -> Mismatch:
    """Both float [N], nats, under the version that sampled: the learner's, the engine's. 1 where they are equal."""
    ratio = torch.exp(torch.clamp((proximal - behaviour).detach(), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return Mismatch(weight=torch.clamp(ratio, max=MISMATCH_CAP), ratio=ratio)
