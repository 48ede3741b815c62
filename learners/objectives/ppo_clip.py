"""PPO's clipped surrogate against the behaviour policy (arXiv 1707.06347; asymmetric as in DAPO, arXiv 2503.14476).

One ratio carries all correction: current weights over the weights that sampled the token, whatever their age. At age 0
and before the update it is 1, and the gradient is the plain policy gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.learners.objectives.ratio import ratio_of
from asyncrl.learners.objectives.surrogate import Surrogate


def ppo_clip(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    *,
    epsilon: float,
    epsilon_high: float,
    dual_clip: float | None = None,
) -> Surrogate:
    """-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A), with r = exp(logprobs - behaviour).

    logprobs [N]: of the current weights, differentiable; behaviour [N]: of the weights that sampled; advantages [N]: of
    each token's row. All float32, nats. Tokens outside the loss may hold any finite value.

    dual_clip c: where A < 0 the loss is at most -c A (arXiv 1912.09729): a stale token that has become c times as
    probable pulls no harder than that, and has no gradient.
    """
    ratio = ratio_of(logprobs - behaviour)
    unclipped = ratio * advantages
    bounded = torch.clamp(ratio, 1 - epsilon, 1 + epsilon_high) * advantages
    objective = torch.minimum(unclipped, bounded)
    clipped = bounded < unclipped
    if dual_clip is not None:
        floor = dual_clip * advantages
        below = (advantages < 0) & (objective < floor)
        objective, clipped = torch.where(below, floor, objective), clipped | below
    return Surrogate(loss=-objective, ratio=ratio.detach(), clipped=clipped.detach())
