"""A version that is an adapter: two factors for each adapted weight, and what an engine makes of them.

    W' = W + scale x B A        (Hu et al. 2021, arXiv 2106.09685; scale = alpha / r)

Learner and engine compute W' in one order of operations, each of which IEEE 754 rounds in one way: the outer products
of the r columns of B and rows of A one after the other, without fused multiply-add, then the scale, then W, in float32;
then the type that is served. A matrix product would choose its own order, by its number of threads, the processor and
the library. So W' has the same bits wherever it is computed, and its checksum proves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from asyncrl.weights.base import StagedWeights, WeightsError
from asyncrl.weights.manifest import Adapter, Form, combined_checksum, compare_forms, form

CPU_TILE = 1 << 15
"""Elements of W' that are computed at once: they stay in a core's cache, and torch splits no more among threads."""

GPU_TILE = 1 << 24
"""The same on a GPU, where each operation has to be worth its start."""


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """The weights of a model as engines hold them; iterating gives (name, tensor), adapters added one at a time.

    Names and order are those of a model without adapters. `tied`: alias -> source, as in `model_tensors`. `factors`: A
    and B by the names under which they are published, float32. What an adapter changes is given in `dtype`, all else as
    it is.
    """

    parts: Sequence[tuple[str, torch.Tensor]]  # of the base model
    tied: Mapping[str, str]
    adapter: Adapter | None = None
    factors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        adapted = set(self.adapter.weights) if self.adapter else set()
        for name, tensor in self.parts:
            if name in adapted:
                tensor = self.sum(name, tensor, torch.empty_like(tensor, dtype=self.dtype))
            yield name, tensor

    def sum(self, name: str, base: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """W' of the adapted weight `name`, whose W is `base`, written to `out`, which is of the same shape and of any
        type of float. Both on one device."""
        assert self.adapter is not None
        a, b = (self.factors[factor].to(base.device) for factor in factor_names(name))
        left, right = (a.T, b.T) if name in self.adapter.transposed else (b, a)
        return add(base, left, right, self.adapter.scale, out=out)


def factor_names(weight: str) -> tuple[str, str]:
    """Under which names A and B of an adapted weight are published: as peft calls them.

    >>> factor_names("model.layers.0.mlp.up_proj.weight")
    ('model.layers.0.mlp.up_proj.lora_A.weight', 'model.layers.0.mlp.up_proj.lora_B.weight')
    """
    layer = weight.removesuffix(".weight")
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


@torch.no_grad()
def add(
    base: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float, *, out: torch.Tensor
) -> torch.Tensor:
    """out = base + scale x left right, in float32, in the order that the module states.

    base, out: [rows, columns] of any type of float; left [rows, r] and right [r, columns], float32.
    """
    columns = right.shape[1]
    tile_size = CPU_TILE if base.device.type == "cpu" else GPU_TILE
    rows = min(len(base), max(1, tile_size // max(1, columns)))
    total, product = torch.empty((2, rows, columns), dtype=torch.float32, device=base.device)
    across = right.contiguous().unbind()
    for start in range(0, len(base), max(1, rows)):
        tile = slice(start, start + rows)
        down = left[tile].unsqueeze(2).unbind(1)
        sums, term = total[: len(down[0])], product[: len(down[0])]
        torch.mul(down[0], across[0], out=sums)
        for column, row in zip(down[1:], across[1:], strict=True):
            torch.mul(column, row, out=term)
            sums.add_(term)
        out[tile].copy_(sums.mul_(scale).add_(base[tile]))
    return out


class Base:
    """The model that an engine adds adapters to, in as few bits as hold it exactly: a model that was published in
    bfloat16 takes two bytes an element. Read by `ServedWeights`, never written to."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]], tied: Mapping[str, str]) -> None:
        """tensors, tied: as `model_tensors` gives them of the model in float32. They are copied."""
        named = list(tensors)
        self.checksum = combined_checksum(named)
        self.tied = dict(tied)
        self.tensors = {name: _smallest(tensor) for name, tensor in named}

    def served(self, staged: StagedWeights) -> ServedWeights:
        """What comes of an adapter. Raises WeightsError: it is of another base, its factors are not those that it says
        it has or do not fit, or it has none."""
        adapter, where = staged.adapter, f"weights {tuple(staged.weights)}"
        if adapter is None:
            raise WeightsError(f"{where} are whole, no adapter")
        if adapter.base != self.checksum:
            raise WeightsError(
                f"{where} are an adapter of {adapter.path} (xxh3 {adapter.base}), but this engine was started on a "
                f"model of xxh3 {self.checksum}: give this collector the same model.path, or set weights.lora: merged"
            )
        found = [form(name, tensor) for name, tensor in staged.tensors.items()]
        compare_forms(list(self._expected(adapter, where)), found, where=f"{where} do not fit their base")
        return ServedWeights(list(self.tensors.items()), self.tied, adapter, staged.tensors)

    def _expected(self, adapter: Adapter, where: str) -> Iterator[Form]:
        """The forms of all factors, in order."""
        order = {name: at for at, name in enumerate(self.tensors)}
        before = -1
        for name in adapter.weights:
            if name not in order or self.tensors[name].dim() != 2 or order[name] <= before:
                raise WeightsError(f"{where}: {name} is no matrix of the base, or comes in another order than there")
            before = order[name]
            outer, inner = self.tensors[name].shape[:: -1 if name in adapter.transposed else 1]
            a, b = factor_names(name)
            yield Form(a, "float32", (adapter.rank, inner))
            yield Form(b, "float32", (outer, adapter.rank))


def _smallest(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, in bfloat16 where that changes no bit."""
    if tensor.dtype == torch.float32:
        short = tensor.to(torch.bfloat16)
        if torch.equal(short.float().view(torch.int32), tensor.contiguous().view(torch.int32)):
            return short
    return tensor.clone(memory_format=torch.contiguous_format)
