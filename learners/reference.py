"""The reference: the weights that the run started from, frozen, which `objective.beta` holds the policy near.

They are never a second model. An adapter is switched off, which leaves what it was trained on. Of a model that is
trained whole, each rank keeps a copy of its own part in host memory, and the model has it for as long as a pass over
the batch takes. A learner that resumes has other weights by then: it takes the copy from where the run started, and
makes sure that it is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.config.recipe import Model
from asyncrl.learners.checkpoint import Checkpoint
from asyncrl.learners.lora import has_adapter
from asyncrl.learners.model import ModelError, load_model
from asyncrl.learners.parallel import ALONE, Ranks
from asyncrl.learners.parameters import Parameters
from asyncrl.weights.manifest import combined_checksum, model_tensors


@dataclass(frozen=True, slots=True)
class Start:
    """What a run started from, before the model is sharded. checksum: xxh3 of its tensors; "" where an adapter is
    trained, whose own files say on what. whole: the model, where the learner begins with other weights."""

    checksum: str
    whole: PreTrainedModel | None

    @classmethod
    def of(cls, model: PreTrainedModel, config: Model, path: Path, checkpoint: Checkpoint | None) -> Start:
        """model: as the learner begins, at the start or from `checkpoint`. Raises ModelError: what `path` gives is not
        what the run started from."""
        if has_adapter(model):
            return cls("", None)
        if checkpoint is None:
            return cls(combined_checksum(model_tensors(model)[0]), None)
        whole = load_model(path, config.dtype, config.attn_implementation, trust_remote_code=config.trust_remote_code)
        here, kept = combined_checksum(model_tensors(whole)[0]), checkpoint.manifest.start
        if here != kept:
            known = f"whose checksum is {kept}" if kept else f"which {checkpoint.folder} does not say"
            raise ModelError(
                f"model.path: {path} has the checksum {here}; the run started from weights {known}\n"
                "objective.beta holds the policy near the weights of the start. Put them back, or begin a new run."
            )
        return cls(here, whole)


class Reference:
    """Of `model`, which is trained and has been sharded since its `start` was looked at."""

    def __init__(self, model: PreTrainedModel, start: Start, ranks: Ranks = ALONE) -> None:
        self.checksum = start.checksum
        self._model = model
        self._parameters = Parameters(model, ranks)
        self._kept: list[Tensor] = []
        if not has_adapter(model):
            whole = start.whole
            self._kept = self._parameters.copies() if whole is None else self._parameters.parts_of(whole)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory, on this rank."""
        return sum(tensor.nbytes for tensor in self._kept)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside it the model is the reference; at the end, come what may, it has its own weights again. Only between
        two steps."""
        if has_adapter(self._model):
            from peft.helpers import rescale_adapter_scale

            with rescale_adapter_scale(self._model, 0.0):
                yield
            return
        own = self._parameters.copies()
        self._parameters.write(self._kept)
        try:
            yield
        finally:
            self._parameters.write(own)
