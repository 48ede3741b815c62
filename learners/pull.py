"""How hard a single token pulls: the norm of its gradient at the logits it was predicted from."""

from __future__ import annotations

import torch
from torch import Tensor


def pull_of(slope: Tensor, logprob: Tensor, collision: Tensor) -> Tensor:
    """|dL/dlog p| x ||dlog p/dz|| of each token [N], z its logits / temperature.

    slope dL/dlog p, logprob log p and collision, the sum over v of p_v^2: [N], of the same distribution. The gradient
    of log p_y is the one-hot of y minus p, with the squared norm (1 - p_y)^2 + (collision - p_y^2). The last term lies
    between 0 and (1 - p_y)^2, and is held there: the difference of two numbers near 1 is all rounding.
    """
    missing = -torch.expm1(logprob.detach())
    others = torch.clamp(collision - torch.exp(2 * logprob.detach()), min=torch.zeros_like(missing), max=missing**2)
    return slope.abs() * torch.sqrt(missing**2 + others)
