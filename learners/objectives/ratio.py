"""Ratios of probabilities, from differences of log-probs."""

from __future__ import annotations

import torch
from torch import Tensor

# |log ratio| beyond this is a broken number, not a policy; exp(20) is 5e8, and float32 overflows at exp(88), where one
# token would make the whole step non-finite. Such a token's gradient is 0.
LOG_RATIO_LIMIT = 20.0


def bounded(log_ratio: Tensor) -> Tensor:
    """float, any shape, nats: cut at LOG_RATIO_LIMIT on both sides."""
    return torch.clamp(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Its exponential, always finite.

    >>> float(ratio_of(torch.tensor(-0.0))), bool(torch.isfinite(ratio_of(torch.tensor(1e30))))
    (1.0, True)
    """
    return torch.exp(bounded(log_ratio))
