"""Low-rank adapters: which layers get one, what engines are given, what a checkpoint keeps.

    W' = W + alpha / r x B A        (Hu et al. 2021, arXiv 2106.09685)

peft puts A and B beside the linear layers of the model that is trained; W stands still. Engines serve W', under the
names of a model without adapters. `weights.lora` says who computes it: the learner, tensor by tensor while it
publishes, or each engine, which is then given A and B alone. The bits are the same (`weights/adapter.py`), and so a
version has one checksum however it was trained and however it travelled. The learner computes x W + x A B and the
engine x W', which agree to float32 rounding.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from asyncrl.config.recipe import Lora
from asyncrl.learners.model import ModelError
from asyncrl.weights.adapter import ServedWeights, factor_names
from asyncrl.weights.manifest import Adapter, combined_checksum, distinct_tensors, model_tensors

if TYPE_CHECKING:
    from peft.tuners.lora import Linear as AdaptedLinear

ADAPTER = "adapter"
"""Folder of a checkpoint that holds the adapter alone, as peft loads it."""

TENSORS = "adapter_model.safetensors"
BASE = "base.json"
PREFIX = "base_model.model."
"""Of every name in peft's files."""


def attach(model: PreTrainedModel, config: Lora, *, seed: int, base: str) -> None:
    """Freeze `model` and put adapters beside the layers that `config` names; from then on only they are trained.

    A is random by `seed`, B is zero, so the model computes what it computed before. `base`: what to call the model in
    the adapter's files. Raises ModelError: peft is missing, or a name fits no linear layer.
    """
    try:
        from peft import LoraConfig, TaskType, inject_adapter_in_model
    except ImportError as error:
        raise ModelError(f"model.lora needs the package peft ({error}): pip install 'asyncrl[lora]'") from error
    if not isinstance(config.target_modules, str):
        _check_targets(model, config.target_modules)
    checksum = combined_checksum(model_tensors(model)[0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(
            LoraConfig(
                r=config.r,
                lora_alpha=config.alpha,  # type: ignore[arg-type]  # annotated int; only ever divided by r
                target_modules=config.target_modules,
                task_type=TaskType.CAUSAL_LM,
                base_model_name_or_path=base,
            ),
            model,
        )
    trained_on: Any = {"path": base, "xxh3": checksum}
    model.adapter_base = trained_on


def has_adapter(model: PreTrainedModel) -> bool:
    """Whether `attach` was called."""
    return hasattr(model, "adapter_base")


def served_weights(
    model: PreTrainedModel, dtype: str = "float32", state: Mapping[str, torch.Tensor] | None = None
) -> ServedWeights:
    """What engines are to serve of `model`, with or without adapters. Tensors are live, not copies; sums are made in
    `dtype`, the rest `in_dtype` converts. state: its state_dict at another time, in place of the present one."""
    state = model.state_dict() if state is None else state
    tensors, tied = distinct_tensors(state)
    if not has_adapter(model):
        return ServedWeights(tensors, tied)
    layers: dict[str, Any] = dict(model.named_modules())
    parts: list[tuple[str, torch.Tensor]] = []
    adapted: dict[str, AdaptedLinear] = {}
    for key, tensor in tensors:
        layer, inside, rest = key.partition(".base_layer.")
        if inside:
            parts.append((f"{layer}.{rest}", tensor))
            if rest == "weight":
                adapted[parts[-1][0]] = layers[layer]
        elif not any(part.startswith("lora_") for part in key.split(".")):
            parts.append((key, tensor))
    factors: dict[str, torch.Tensor] = {}
    for name in adapted:
        layer = name.removesuffix(".weight")
        linear = (state[f"{layer}.lora_{letter}.default.weight"] for letter in "AB")
        factors |= dict(zip(factor_names(name), linear, strict=True))
    trained_on = _trained_on(model)
    config: Any = model.peft_config["default"]
    adapter = Adapter(
        base=trained_on["xxh3"],
        path=trained_on["path"],
        rank=config.r,
        scale=config.lora_alpha / config.r,
        weights=tuple(adapted),
        transposed=tuple(name for name, module in adapted.items() if module.fan_in_fan_out),
    )
    return ServedWeights(parts, tied, adapter, factors, getattr(torch, dtype))


def in_dtype(tensors: Iterable[tuple[str, torch.Tensor]], dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights in the type that engines compute in ("bfloat16"), one tensor at a time; what is no float stays."""
    for name, tensor in tensors:
        yield name, tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor


def save_model(model: PreTrainedModel, folder: Path, state: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write what `save_pretrained` writes, adapters merged, and the adapter alone into `folder`/adapter.

    So a checkpoint loads like any other model, and PeftModel.from_pretrained(base, folder/adapter) gives the same.
    state: as in `served_weights`.
    """
    state = dict(model.state_dict() if state is None else state)  # save_pretrained takes out of it what it has written
    if not has_adapter(model):
        model.save_pretrained(folder, state_dict=state)
        return
    model.save_pretrained(folder, state_dict=dict(served_weights(model, state=state)))
    adapter = folder / ADAPTER
    adapter.mkdir()
    factors = _adapter(model, state)
    save_file({f"{PREFIX}{name}": tensor.contiguous() for name, tensor in factors.items()}, adapter / TENSORS)
    model.peft_config["default"].save_pretrained(str(adapter))
    (adapter / BASE).write_text(json.dumps(_trained_on(model), indent=1))


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Continue the adapter of the checkpoint `folder` on the model that it was trained on, bit for bit.

    Raises ModelError: there is none, it is of other layers or another rank, or the model is not that one.
    """
    from peft import set_peft_model_state_dict

    adapter = folder / ADAPTER
    if not (adapter / TENSORS).is_file():
        raise ModelError(f"model.lora is set, but the checkpoint {folder} has no adapter: it was trained without one")
    base, here = json.loads((adapter / BASE).read_bytes()), _trained_on(model)
    if base["xxh3"] != here["xxh3"]:
        raise ModelError(
            f"the adapter in {folder} was trained on {base['path']} (xxh3 {base['xxh3']}), but model.path gives other "
            f"weights: {here['path']} (xxh3 {here['xxh3']})"
        )
    state = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(adapter / TENSORS).items()}
    expected = {name: tensor.shape for name, tensor in _adapter(model).items()}
    if expected != {name: tensor.shape for name, tensor in state.items()}:
        raise ModelError(f"the adapter in {folder} does not fit model.lora: it is of another rank or of other layers")
    set_peft_model_state_dict(model, state)


def _adapter(model: PreTrainedModel, state: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """A and B of every layer, out of `state` or as they are, under peft's names without their prefix."""
    from peft import get_peft_model_state_dict

    # Told not to, it does not ask a hub whether the base model's vocabulary is the same.
    found: dict[str, torch.Tensor] = get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
    return found


def _trained_on(model: PreTrainedModel) -> dict[str, str]:
    found: Any = model.adapter_base
    return dict(found)


def _check_targets(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Each name fits at least one module, whole or as the last parts of a dotted name, and only linear ones."""
    modules = {key: module for key, module in model.named_modules() if key}
    linear = dict.fromkeys(key.rpartition(".")[2] for key, module in modules.items() if _adaptable(model, module))
    for name in names:
        found = [module for key, module in modules.items() if key == name or key.endswith(f".{name}")]
        wrong = next((module for module in found if not _adaptable(model, module)), None)
        if found and wrong is None:
            continue
        architecture = type(model).__name__
        why = f"{architecture} has no such module" if wrong is None else f"in {architecture} {_why_not(model, wrong)}"
        raise ModelError(
            f'model.lora.target_modules has "{name}", but {why}.\n'
            f"Write all-linear, or out of its linear layers: {', '.join(linear)}."
        )


def _adaptable(model: PreTrainedModel, module: torch.nn.Module) -> bool:
    """Linear, with a weight of its own: an adapter beside a tied head would have to change the embedding as well."""
    return isinstance(module, torch.nn.Linear | Conv1D) and not _is_tied_head(model, module)


def _is_tied_head(model: PreTrainedModel, module: torch.nn.Module) -> bool:
    embedding = model.get_input_embeddings()
    return module is not embedding and getattr(module, "weight", None) is embedding.weight


def _why_not(model: PreTrainedModel, module: torch.nn.Module) -> str:
    tied = _is_tied_head(model, module)
    return "that is the head, tied to the embedding" if tied else f"that is no linear layer: {type(module).__name__}"
