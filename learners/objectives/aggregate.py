"""From per-token losses to one number."""

from __future__ import annotations

import torch
from torch import Tensor


def token_sum(losses: Tensor, trained: Tensor) -> Tensor:
    """Sum of `losses` [N] over the tokens in `trained` (bool [N]); what stands at the others, even NaN, is not seen.

    The mean over tokens has the denominator of the whole step, not of a micro-batch: the mean of portions' means would
    weigh a token by the company it is packed with. So portions give sums, and the step divides once.

    >>> float(token_sum(torch.tensor([4.0, float("nan"), 0.0]), torch.tensor([True, False, True])))
    4.0
    """
    return torch.where(trained, losses, torch.zeros((), dtype=losses.dtype, device=losses.device)).sum()
