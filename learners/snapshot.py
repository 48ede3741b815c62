"""Everything a checkpoint is written from, as it was at one step.

A step's weights change with the next update, so what is written beside training has to be copied first: into host
memory that is taken once and used again for the next checkpoint. Parameters that are not trained never change and are
not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.staleness import Weights

Keep = Callable[[Hashable, Tensor], Tensor]
"""What a snapshot keeps of a tensor that has this key: a copy, or the tensor itself."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """model: for its configuration; what its tensors were is `state`, by their names in its state_dict. optimizer: what
    `Optimizer.state_dict` gave. rng: of every rank. more: what else resuming needs, for torch.load(weights_only=True).

    forks, trained, tokens, start: as in `checkpoint.Manifest`.
    """

    weights: Weights
    model: PreTrainedModel
    state: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    rng: list[dict[str, Tensor]]
    forks: dict[int, tuple[int, int]]
    trained: list[tuple[int, int]]
    tokens: int
    start: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)


class Copies:
    """The host memory of one snapshot at a time: the next one overwrites it."""

    def __init__(self) -> None:
        self._held: dict[Hashable, Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._held.values())

    @torch.no_grad()
    def keep(self, key: Hashable, tensor: Tensor) -> Tensor:
        """The copy of `tensor`, in the memory that this key had before, if it had the same form."""
        held = self._held.get(key)
        if held is None or (held.shape, held.dtype) != (tensor.shape, tensor.dtype):
            # Pinned, a GPU copies into it four times as fast.
            held = self._held[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return held.copy_(tensor)


def live(_: Hashable, tensor: Tensor) -> Tensor:
    """Keep nothing: for a snapshot that is written before anything goes on."""
    return tensor.detach()


def state_of(model: PreTrainedModel, keep: Keep) -> dict[str, Tensor]:
    """The state_dict of `model`, of which what may change is kept. Names of one tensor (a tied head) stay names of one
    tensor."""
    state: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first = names.setdefault(id(tensor), name)
        if first != name:
            state[name] = state[first]
        elif isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad:
            state[name] = tensor.detach()
        else:
            state[name] = keep(name, tensor.detach())
    return state
