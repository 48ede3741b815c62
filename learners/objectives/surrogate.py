"""What every surrogate says of each token."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Surrogate:
    """Per token [N]. loss: to minimise, differentiable. ratio: detached. clipped: the clip took the gradient away, or
    where it leaves it cut the ratio."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
