"""PPO's clipped surrogate against the behaviour policy (arXiv 1707.06347; asymmetric as in DAPO, arXiv 2503.14476).

One ratio carries all correction: current weights over the weights that sampled the token, whatever their age. At age 0
and before the update it is 1, and the gradient is the plain policy gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# |log ratio| beyond this is a broken number, not a policy; exp(20) is 5e8, and float32 overflows at exp(88), where one
# token would make the whole step non-finite. Such a token's gradient is 0.
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, slots=True)
class Surrogate:
    """Per token [N]. loss: to minimise, differentiable. ratio: detached. clipped: the clip took the gradient away."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def ppo_clip(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, *, epsilon: float, epsilon_high: float
) -> Surrogate:
    """-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A), with r = exp(logprobs - behaviour).

    logprobs [N]: of the current weights, differentiable; behaviour [N]: of the weights that sampled; advantages [N]: of
    each token's row. All float32, nats. Tokens outside the loss may hold any finite value.
    """
    log_ratio = torch.clamp(logprobs - behaviour, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = torch.exp(log_ratio)
    unclipped = ratio * advantages
    bounded = torch.clamp(ratio, 1 - epsilon, 1 + epsilon_high) * advantages
    return Surrogate(
        loss=-torch.minimum(unclipped, bounded),
        ratio=ratio.detach(),
        clipped=(bounded < unclipped).detach(),
    )
