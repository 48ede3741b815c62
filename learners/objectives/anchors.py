"""What holds the weights near the policy that sampled: an estimate of a divergence, added to the loss of each token.

The estimators of Schulman (2020, "Approximating KL divergence"), with r = pi / mu and tokens from mu. Since mu does not
change with the weights, differentiating an expectation over mu is differentiating inside it, so that k1 and k3 have
both the value and the gradient of KL(mu || pi), token by token. The trap of k1, whose expected gradient is 0, is that
of samples from pi itself. k2 agrees with them to second order around pi = mu, and has less variance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.learners.objectives.ratio import bounded


def kl_to_behaviour(logprobs: Tensor, behaviour: Tensor, *, estimator: str) -> Tensor:
    """[N], differentiable, for minimising. logprobs [N]: of the current weights; behaviour [N]: of those that sampled.

    - k1: -log r, gradient -1 in the log-prob
    - k2: (log r)^2 / 2, gradient log r
    - k3: r - 1 - log r, gradient r - 1; never below 0
    """
    log_ratio = bounded(logprobs - behaviour)
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio**2 / 2
    return torch.expm1(log_ratio) - log_ratio
