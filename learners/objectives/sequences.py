"""Answers back to back, and sums over each one's tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sequences:
    """R answers back to back, N tokens: of an answer in several segments, those of all. cu int64 [R + 1]: where each
    begins; tokens bool [N]: those that count."""

    cu: Tensor
    tokens: Tensor

    def spread(self, values: Tensor) -> Tensor:
        """[R] -> [N]: each token has what its sequence has."""
        return torch.repeat_interleave(values, self.cu.diff(), output_size=len(self.tokens))

    def sum(self, values: Tensor) -> Tensor:
        """[N] -> [R], over the tokens that count; what stands at the others, even NaN, is not seen. Differentiable.

        >>> of = Sequences(torch.tensor([0, 2, 3]), torch.tensor([True, False, True]))
        >>> of.sum(torch.tensor([1.0, float("nan"), 3.0])).tolist()
        [1.0, 3.0]
        """
        counted = torch.where(self.tokens, values, torch.zeros((), dtype=values.dtype, device=values.device))
        # By offsets, in a fixed order: adding by index is not, on GPUs.
        return torch.segment_reduce(counted, "sum", offsets=self.cu, initial=0.0)

    @property
    def counts(self) -> Tensor:
        """float [R]: tokens that count."""
        return self.sum(torch.ones(len(self.tokens), device=self.tokens.device))

    def mean(self, values: Tensor) -> Tensor:
        """[N] -> [R], 0 for a sequence without a token that counts."""
        return self.sum(values) / self.counts.clamp(min=1).to(values.dtype)
