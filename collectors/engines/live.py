"""The served model and the next weights beside it.

`stage` has a second set of tensors ready while decoding goes on: a copy, or the very memory that the learner wrote, if
that is mapped. `activate` points the model at it, which copies nothing, and proves from the live tensors that what is
served now is what was published. Failing that, the model is pointed back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.collectors.engines.spans import Served
from asyncrl.staleness import Weights
from asyncrl.weights.adapter import Base, ServedWeights
from asyncrl.weights.base import StagedWeights, WeightsError
from asyncrl.weights.manifest import check_fits, check_tied, combined_checksum, model_tensors, verify_served


def load_model(path: Path, *, dtype: str, attn: str, trust_remote_code: bool, place: int = 0) -> PreTrainedModel:
    """The architecture to serve, in eval mode, without gradients, on a GPU if there is one: those that this process
    sees are dealt out in turn by `place`. The weights it comes with serve nothing: the first activation replaces them
    all."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=getattr(torch, dtype),
        attn_implementation=None if attn == "auto" else attn,
        trust_remote_code=trust_remote_code,
    )
    module: torch.nn.Module = model
    gpus = torch.cuda.device_count()
    module.to(torch.device("cuda", place % gpus) if gpus else "cpu").eval().requires_grad_(False)
    return model


def load_base(path: Path, *, attn: str, trust_remote_code: bool, place: int = 0) -> Base:
    """What adapters are added to, as the learner has it: the same file in float32, whatever is served."""
    model = load_model(path, dtype="float32", attn=attn, trust_remote_code=trust_remote_code, place=place)
    return Base(*model_tensors(model))


@dataclass(frozen=True, slots=True)
class _Tensors:
    """All of the model's tensors, by name, in one of the places it can be pointed at."""

    by_name: Mapping[str, torch.Tensor]
    own: Mapping[str, torch.Tensor]  # those of them that are free to be written again when it is pointed elsewhere


class LiveModel:
    """A model whose weights can be exchanged. `stage` runs in any thread, `activate` in the one that decodes."""

    def __init__(self, model: PreTrainedModel, base: Base | None = None) -> None:
        """base: to which adapters are added; without one only whole weights can be served."""
        self.model = model
        self._base = base
        self._unadapted: dict[str, torch.Tensor] = {}  # of the base, in the type that is served
        tensors, self._tied = model_tensors(model)
        self._parts: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)  # what the layers compute with
        # Not for the next copy: it lies where the file of the model put it, and on which boundary a tensor lies decides
        # over the last bit of a product. Copies and mapped weights all lie on the same.
        self._live = _Tensors(dict(tensors), own={})
        self._staged: tuple[Served, _Tensors] | None = None
        self._spare: dict[str, torch.Tensor] = {}
        self._served: Served | None = None
        # Held while tensors are written or exchanged: an activation never takes a half-copied set.
        self._lock = threading.Lock()

    def stage(self, staged: StagedWeights) -> None:
        """Have the weights ready beside the served ones: where they lie, if they are mapped on the model's device, else
        as a copy, or as the sum of the base and an adapter. The newest staged ones win. Non-persistent buffers (rotary
        tables) are functions of the configuration and stay.

        Raises WeightsError, before anything is copied, if a tensor is missing, extra, reordered, of another shape or
        type, or tied otherwise than here; if an adapter is of another base.
        """
        sums = self._sums(staged) if staged.adapter else None
        if sums is None:
            check_fits(self.model, staged)
        with self._lock:
            if self._staged is not None:
                (_, unused), self._staged = self._staged, None
                self._let_go(unused)
            if sums is not None:
                tensors = self._added(sums)
            elif staged.mapped and all(tensor.device == self.model.device for tensor in staged.tensors.values()):
                tensors = _Tensors(staged.tensors, own={})
            else:
                copies = {name: self._room(name).copy_(tensor) for name, tensor in staged.tensors.items()}
                tensors = _Tensors(copies, own=copies)
            self._staged = Served(staged.weights, staged.checksum), tensors

    def activate(self, exchanged: Callable[[], None] = lambda: None) -> Served:
        """Serve the staged weights. Where they were published with a checksum, the live tensors are compared with it;
        `exchanged` is called before that. Raises WeightsError if none are staged, or if they differ; then the old
        weights are back."""
        with self._lock:
            if self._staged is None:
                raise WeightsError("no weights are staged: call stage() before activate()")
            (served, tensors), self._staged = self._staged, None
            self._point_at(tensors)
            exchanged()
            try:
                if served.checksum:
                    verify_served(self.model, served.checksum)
            except WeightsError:
                self._point_at(self._live)
                self._let_go(tensors)
                raise
            previous, self._live = self._live, tensors
            self._let_go(previous)
            self._served = served
            return served

    def verify(self) -> tuple[Weights, str]:
        """What is served, and the combined checksum of the live tensors as they are now. In any thread: decoding only
        reads them, and an activation waits. Raises WeightsError if nothing is served."""
        with self._lock:
            if self._served is None:
                raise WeightsError("nothing is served yet: call activate() before verify()")
            tensors, _ = model_tensors(self.model)
            return self._served.weights, combined_checksum(tensors)

    def _sums(self, staged: StagedWeights) -> ServedWeights:
        if self._base is None:
            raise WeightsError(
                f"weights {tuple(staged.weights)} are an adapter, and this engine keeps no base to add it to: in its "
                "recipe weights.lora is not adapter"
            )
        sums = self._base.served(staged)
        check_tied(self._tied, staged)
        return sums

    def _added(self, sums: ServedWeights) -> _Tensors:
        """The base with an adapter, tensor by tensor in the type that is served."""
        assert sums.adapter is not None
        adapted = set(sums.adapter.weights)
        own: dict[str, torch.Tensor] = {}
        for name, base in sums.parts:
            if name in adapted:
                own[name] = sums.sum(name, base, self._room(name))
            elif name not in self._unadapted:
                self._unadapted[name] = base.to(self._live.by_name[name].dtype)
        by_name = {name: own[name] if name in own else self._unadapted[name] for name, _ in sums.parts}
        return _Tensors(by_name, own)

    def _room(self, name: str) -> torch.Tensor:
        """Memory for a tensor of the model; undefined."""
        room = self._spare.pop(name, None)
        return torch.empty_like(self._live.by_name[name]) if room is None else room

    def _point_at(self, tensors: _Tensors) -> None:
        """The layers' own objects get other memory: nothing is copied, and who holds one of them follows."""
        for name, part in self._parts.items():
            part.data = tensors.by_name[self._tied.get(name, name)]

    def _let_go(self, tensors: _Tensors) -> None:
        """The model is pointed elsewhere. Own memory is kept for the next copy; an engine whose weights come mapped
        never asks for it, so it goes with the first of them."""
        self._spare = dict(tensors.own) if self._live.own else {}
