"""The served model and the next weights beside it.

`stage` fills a second set of tensors while decoding goes on; `activate` exchanges the two sets in place and proves,
from the live tensors, that what is served now is what was published. Failing that, the sets change places again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.collectors.engines.spans import Served
from asyncrl.staleness import Weights
from asyncrl.weights.base import StagedWeights, WeightsError
from asyncrl.weights.manifest import check_fits, combined_checksum, model_tensors, verify_served


def load_model(path: Path, *, dtype: str, attn: str, trust_remote_code: bool) -> PreTrainedModel:
    """The architecture to serve, in eval mode, without gradients, on the GPU if there is one. The weights it comes with
    serve nothing: the first activation replaces them all."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=getattr(torch, dtype),
        attn_implementation=None if attn == "auto" else attn,
        trust_remote_code=trust_remote_code,
    )
    module: torch.nn.Module = model
    module.to("cuda" if torch.cuda.is_available() else "cpu").eval().requires_grad_(False)
    return model


def device_of(model: PreTrainedModel) -> str:
    """ "cpu", or the UUID of the GPU that the model is on: the same one has another index in another process."""
    if model.device.type != "cuda":
        return model.device.type
    return str(torch.cuda.get_device_properties(model.device).uuid)


class LiveModel:
    """A model whose weights can be exchanged. `stage` runs in any thread, `activate` in the one that decodes."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._beside: dict[str, torch.Tensor] = {}
        self._staged: Served | None = None
        self._served: Served | None = None
        # Held while the tensors beside are written or exchanged: an activation never takes a half-copied set.
        self._lock = threading.Lock()

    def stage(self, staged: StagedWeights) -> None:
        """Copy the weights beside the served ones; the newest staged ones win. Non-persistent buffers (rotary tables)
        are functions of the configuration and stay.

        Raises WeightsError, before anything is copied, if a tensor is missing, extra, reordered, of another shape or
        type, or tied otherwise than here.
        """
        check_fits(self.model, staged)
        with self._lock:
            self._staged = None
            live, _ = model_tensors(self.model)
            for name, tensor in live:
                if name not in self._beside:
                    self._beside[name] = torch.empty_like(tensor)
                self._beside[name].copy_(staged.tensors[name])
            self._staged = Served(staged.weights, staged.checksum)

    def activate(self, exchanged: Callable[[], None] = lambda: None) -> Served:
        """Serve the staged weights. Where they were published with a checksum, the live tensors are compared with it;
        `exchanged` is called before that. Raises WeightsError if none are staged, or if they differ; then the old
        weights are back."""
        with self._lock:
            if self._staged is None:
                raise WeightsError("no weights are staged: call stage() before activate()")
            served, self._staged = self._staged, None
            self._exchange()
            exchanged()
            try:
                if served.checksum:
                    verify_served(self.model, served.checksum)
            except WeightsError:
                self._exchange()
                raise
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

    def _exchange(self) -> None:
        """In place, so that tied aliases and whoever else holds a tensor follow."""
        live, _ = model_tensors(self.model)
        with torch.no_grad():
            for name, tensor in live:
                previous = tensor.clone()
                tensor.copy_(self._beside[name])
                self._beside[name].copy_(previous)
