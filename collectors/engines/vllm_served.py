"""What a vLLM worker computes with, tensor by tensor, under the names that the learner publishes.

vLLM fuses tensors (q, k and v; gate and up), pads the vocabulary, and on a CPU packs a matrix into the format of its
kernel and drops the original. So "served" is read back from where the computation takes it: a slice of the live
parameter, or, of a packed matrix, what the kernel makes of the identity: row i of I W^T is column i of W, exactly,
since all other products are 0. Only the sign of a zero is lost on that way.

Runs in the worker process. What is not a plain tensor of one worker (quantized, sharded, renamed) is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from asyncrl.weights.base import WeightsError
from asyncrl.weights.manifest import Form, dtype_name

PROBED_ROWS = 1024
"""Rows of the identity that go through a kernel at once: 32 MiB of them where a matrix has 8,192 columns of float32."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a published tensor lies: rows [start, end) of a parameter. end None: all of it."""

    module: str
    parameter: str
    start: int = 0
    end: int | None = None


class ServedModel:
    """The model of one worker, read by published names."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
        self._parts: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        # A head in another type than the rest multiplies with its parameter, though vLLM packs that as well.
        self._wide_head = any(
            isinstance(module, LogitsProcessor) and module.head_dtype not in (None, next(model.parameters()).dtype)
            for module in self._modules.values()
        )
        self._fused = {part: whole for whole, parts in self._parts.items() for part in parts}

    def tensor(self, name: str, columns: int, *, multiplied: bool = False) -> tuple[torch.Tensor, bool]:
        """The live tensor published as `name`, whose last dimension has `columns`, and whether it was read through a
        kernel, which loses the signs of zeros. `multiplied`: of a head that is tied to a table of embeddings, what the
        logits are made with, and not the table that is looked up. Raises WeightsError if there is no such tensor."""
        place = self._find(name)
        module = self._modules[place.module]
        table = hasattr(module, "org_vocab_size") and not (multiplied or isinstance(module, ParallelLMHead))
        unpacked = table or (self._wide_head and isinstance(module, ParallelLMHead))
        packed = place.parameter == "weight" and hasattr(module, "cpu_linear") and not unpacked
        whole = _through_kernel(module, columns) if packed else getattr(module, place.parameter).detach()
        return whole[place.start : place.end], packed

    def check(self, forms: Iterable[Form], tied: Mapping[str, str]) -> None:
        """Check that the model consists of exactly these tensors. Raises WeightsError that names the first one that is
        missing, of another form, or not published."""
        unpublished = {
            f"{path}.{name}": self._form(name, _Place(path, name, end=getattr(module, "org_vocab_size", None))).shape[0]
            for path, module in self._modules.items()
            for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)
        }  # rows
        for form in forms:
            place = self._find(form.name)
            if (found := self._form(form.name, place)) != form:
                raise WeightsError(
                    f"{form.name} is {found.dtype}{list(found.shape)} in the vLLM model, published as "
                    f"{form.dtype}{list(form.shape)}"
                )
            unpublished[f"{place.module}.{place.parameter}"] -= form.shape[0]
        for alias in tied:
            place = self._find(alias)
            unpublished[f"{place.module}.{place.parameter}"] = 0
        if missing := [name for name, rows in unpublished.items() if rows]:
            raise WeightsError(f"the vLLM model also has {', '.join(missing[:5])}, or a part of it: not published")

    def _form(self, name: str, place: _Place) -> Form:
        module = self._modules[place.module]
        parameter = getattr(module, place.parameter)
        # A matrix that was packed leaves an empty parameter behind; its layer knows both sizes.
        shape = tuple(parameter.shape) if parameter.numel() else (module.output_size, module.input_size)
        rows = (shape[0] if place.end is None else place.end) - place.start
        return Form(name, dtype_name(parameter.dtype), (rows, *shape[1:]))

    def _find(self, name: str) -> _Place:
        path, _, parameter = name.rpartition(".")
        module: Any = self._modules.get(path)
        if hasattr(module, parameter):
            # Behind the vocabulary a table of embeddings is padded.
            return _Place(path, parameter, end=getattr(module, "org_vocab_size", None))
        parent, _, part = path.rpartition(".")
        whole = self._fused.get(part, "")
        module = self._modules.get(f"{parent}.{whole}")
        if not (whole and hasattr(module, parameter)):
            raise WeightsError(f"{name} is nothing that the vLLM model has under this name or fused with others")
        at, sizes = self._parts[whole].index(part), module.output_sizes
        start = sum(sizes[:at])
        return _Place(f"{parent}.{whole}", parameter, start, start + sizes[at])


def _through_kernel(module: Any, columns: int) -> torch.Tensor:
    """The matrix [rows, columns] that a packed layer multiplies with."""
    made = []
    for start in range(0, columns, PROBED_ROWS):
        rows = torch.zeros(min(PROBED_ROWS, columns - start), columns, dtype=module.weight.dtype)
        rows[:, start:].fill_diagonal_(1)
        made.append(module.cpu_linear(rows, module.weight, None))
    return torch.cat(made).T
