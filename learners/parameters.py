"""The parameters that are trained, as a rank has them: read, copied to host memory, or exchanged for other values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.learners.parallel import ALONE, Ranks


class Parameters:
    """Of `model`, this rank's part of each, in the model's order."""

    def __init__(self, model: PreTrainedModel, ranks: Ranks = ALONE) -> None:
        self._model = model
        # The objects: a sharded model that has gathered its weights shows others in their place.
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._ranks = ranks

    def __len__(self) -> int:
        return len(self._parameters)

    def live(self) -> Iterator[Tensor]:
        """The memory itself."""
        return (self._ranks.own(parameter).detach() for parameter in self._parameters)

    def copies(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """In host memory, in `dtype` or in their own."""
        return [live.to("cpu", dtype or live.dtype, copy=True).contiguous() for live in self.live()]

    def parts_of(self, whole: PreTrainedModel) -> list[Tensor]:
        """What this rank would have of the same parameters of `whole`, which is not sharded; in host memory. Every rank
        calls it."""
        tensors = [p.detach() for p in whole.parameters() if p.requires_grad]
        return [
            self._ranks.own(self._ranks.part_of(tensor, like)).to("cpu", copy=True).contiguous()
            for tensor, like in zip(tensors, self._parameters, strict=True)
        ]

    @torch.no_grad()
    def write(self, tensors: Iterable[Tensor]) -> None:
        """Give the model these, one for each parameter: between two passes."""
        for live, tensor in zip(self.live(), tensors, strict=True):
            live.copy_(tensor)
        self._ranks.refresh(self._model)
