"""What holds the weights near another policy: an estimate of a divergence, added to the loss of each token. By the
estimators of Schulman (2020, "Approximating KL divergence"); tokens are samples of mu, and r = pi / mu.

KL(mu || pi), to the policy that sampled. Since mu does not change with the weights, differentiating an expectation over
mu is differentiating inside it, so that k1 and k3 have both its value and its gradient, token by token. The trap of k1,
whose expected gradient is 0, is that of samples from pi itself. k2 agrees with them to second order around pi = mu, and
has less variance.

KL(pi || ref), to a frozen reference, is an expectation over pi, from which nobody samples. Given what comes before the
token, and with x = log pi - log ref,

    KL(pi || ref) = E_mu[r x]        its gradient = E_mu[r x grad log pi] = E_mu[r (x + 1) grad log pi]

by E_mu[r grad log pi] = 0. Estimators that leave r out have another gradient: even where mu is pi, k1 has none, and k3
has that of KL(ref || pi); only k2 is right there (arXiv 2510.01555). With r in the loss and differentiated too, as in
DeepSeek-V3.2 (arXiv 2512.02556), k1 and k3 have both value and gradient, whoever sampled. What is not corrected is how
often the prefix comes up, as with any weight of single tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.learners.objectives.ratio import LOG_RATIO_LIMIT, bounded, ratio_of


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


def kl_to_reference(logprobs: Tensor, behaviour: Tensor, reference: Tensor, *, estimator: str) -> Tensor:
    """[N], differentiable, for minimising. logprobs [N]: of the current weights; behaviour [N]: of those that sampled;
    reference [N]: of the reference.

    - k1: r x, gradient r (x + 1) in the log-prob: no bias, much variance
    - k2: r x^2 / 2, gradient r x: that of k3, token by token; the value is right to second order
    - k3: r (exp(-x) - 1 + x), gradient r x; never below 0
    """
    with torch.no_grad():
        log_ratio = logprobs - behaviour
        ratio, x = ratio_of(log_ratio), bounded(logprobs - reference)
        slope = ratio * (x + 1 if estimator == "k1" else x)
        # As in `ratio_of`: a broken number pulls at nothing.
        slope = torch.where(log_ratio.abs() < LOG_RATIO_LIMIT, slope, torch.zeros_like(slope))
        value = ratio * {"k1": x, "k2": x**2 / 2, "k3": torch.expm1(-x) + x}[estimator]
    # The gradient is put in as it is known to be: of k3's own terms, exp(-x) large and r small, rounding would be left.
    return value + slope * (logprobs - logprobs.detach())
