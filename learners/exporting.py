"""From a checkpoint to what others load: the whole model in the type it is served in, or the adapter alone.

Whatever is written is proved by the rule that proves what engines serve (`weights/manifest.py`): in `model.dtype` its
combined checksum is the one with which the version was announced, and the folder is read again before it counts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from asyncrl.learners.checkpoint import TRAINING, Checkpoint
from asyncrl.learners.lora import ADAPTER, BASE, PREFIX, TENSORS
from asyncrl.weights.adapter import factor_names
from asyncrl.weights.manifest import (
    Adapter,
    Manifest,
    TensorSpec,
    aligned,
    combine,
    compare,
    describe,
    model_tensors,
    tensor_bytes,
)

Form = Literal["hf", "adapter", "merged"]
Phase = Literal["load", "write", "compare"]

REWRITTEN = ("config.json", "generation_config.json")
"""What `save_pretrained` writes anew beside the weights: the first names the type they are in."""


def has_adapter(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint was trained with `model.lora`."""
    return f"{ADAPTER}/{TENSORS}" in checkpoint.manifest.files


def write_form(
    checkpoint: Checkpoint,
    folder: Path,
    form: Form,
    *,
    dtype: str,
    trust_remote_code: bool,
    on_phase: Callable[[Phase], None],
) -> Manifest:
    """Write `form` of the checkpoint into the empty `folder`, read it again, and return what was written, tensor by
    tensor, as it is published. `on_phase` hears what is about to begin.

    hf, merged: the whole model, floats in `dtype` ("float32" or "bfloat16"); adapters are in it, summed as engines sum
    them. adapter: A and B in float32, as peft loads them; its manifest's `served` is the whole model's in `dtype`.
    Tokenizer, chat template and a model's own code are copied from the checkpoint. One model is in memory at a time.
    Raises WeightsError: what is read again is not what was written; OSError, SafetensorError.
    """
    on_phase("load")
    model = _loaded(checkpoint.folder, dtype, trust_remote_code=trust_remote_code)
    manifest = manifest_of(*model_tensors(model))
    if form == "adapter":
        manifest = _of_adapter(checkpoint.folder / ADAPTER, model, served=manifest)
    on_phase("write")
    _copy_companions(checkpoint, folder)
    if form == "adapter":
        for name in (TENSORS, "adapter_config.json"):
            shutil.copyfile(checkpoint.folder / ADAPTER / name, folder / name)
    else:
        model.save_pretrained(folder)
    del model  # not two of them
    on_phase("compare")
    if form == "adapter":
        factors = _factors(folder)
        found = manifest_of([(spec.name, factors[spec.name]) for spec in manifest.tensors], {})
    else:
        found = manifest_of(*model_tensors(_loaded(folder, dtype, trust_remote_code=trust_remote_code)))
    compare(manifest, found.tensors, tied=found.tied, where=str(folder))
    return manifest


def manifest_of(
    tensors: Iterable[tuple[str, torch.Tensor]], tied: Mapping[str, str], adapter: Adapter | None = None
) -> Manifest:
    """What `Images.write` would publish of these tensors."""
    specs: list[TensorSpec] = []
    end = 0
    for name, tensor in tensors:
        checksum = xxhash.xxh3_64_hexdigest(tensor_bytes(name, tensor))
        specs.append(describe(name, tensor, offset=aligned(end), checksum=checksum))
        end = aligned(end) + tensor.nbytes
    return Manifest(tuple(specs), dict(tied), combine(spec.checksum for spec in specs), adapter=adapter)


def _loaded(folder: Path, dtype: str, *, trust_remote_code: bool) -> PreTrainedModel:
    """The model with every float in `dtype`, also those that an architecture would keep in float32: none is served in
    another type."""
    kind = getattr(torch, dtype)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=kind, trust_remote_code=trust_remote_code
    )
    torch.nn.Module.to(model, kind)
    return model


def _of_adapter(folder: Path, model: PreTrainedModel, *, served: Manifest) -> Manifest:
    """The adapter in `folder`, as it is published alone. model: the one that it makes, which is `served`."""
    config = json.loads((folder / "adapter_config.json").read_bytes())
    base = json.loads((folder / BASE).read_bytes())
    factors = _factors(folder)
    adapted = tuple(spec.name for spec in served.tensors if factor_names(spec.name)[0] in factors)
    adapter = Adapter(
        base=base["xxh3"],
        path=base["path"],
        rank=config["r"],
        scale=config["lora_alpha"] / config["r"],
        weights=adapted,
        transposed=tuple(name for name in adapted if isinstance(_layer(model, name), Conv1D)),
        served=served.checksum,
    )
    ordered = [(factor, factors[factor]) for name in adapted for factor in factor_names(name)]
    return manifest_of(ordered, {}, adapter)


def _factors(folder: Path) -> dict[str, torch.Tensor]:
    """A and B by the names under which they are published."""
    return {name.removeprefix(PREFIX): tensor for name, tensor in load_file(folder / TENSORS).items()}


def _layer(model: PreTrainedModel, weight: str) -> Any:
    return model.get_submodule(weight.removesuffix(".weight"))


def _copy_companions(checkpoint: Checkpoint, folder: Path) -> None:
    """Everything in the checkpoint that belongs to the model and is not its weights, byte for byte."""
    for name in checkpoint.manifest.files:
        path = Path(name)
        if name in (*REWRITTEN, TRAINING) or path.parts[0] == ADAPTER or ".safetensors" in path.name:
            continue
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkpoint.folder / path, folder / path)
