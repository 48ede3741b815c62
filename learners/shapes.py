"""What a model is made of, without loading it: the shape of every tensor, and the widths its passes run at. No torch.

From its folder: `config.json`, and the headers of its safetensors files, which name every tensor. Where there are no
such files the shapes follow from the configuration, for the architectures whose layers are written down here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from asyncrl.config.recipe import BUILTIN_MODELS

TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
"""The built-in models, which may not have been made yet."""

_QWEN25: dict[str, Any] = {"model_type": "qwen2", "vocab_size": 151_936, "max_position_embeddings": 32_768}

PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": {
        **_QWEN25,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-1.5B-Instruct": {
        **_QWEN25,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-3B-Instruct": {
        **_QWEN25,
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-7B-Instruct": {
        **_QWEN25,
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
"""What config.json of these models of the Hugging Face hub says, for a machine that does not have them."""

WRITTEN_DOWN = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` whose tensors `_by_formula` knows."""

EMBEDDINGS = ("embed", "wte", "wpe", "lm_head", "shared")
"""In the name of a matrix that is an embedding or the head, which `all-linear` leaves out."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shapes:
    """tensors: by name, each that is held once; of a tied head there is none. The rest are numbers of config.json;
    longest: tokens of a sequence, None where it does not say."""

    tensors: Mapping[str, Shape]
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    longest: int | None

    @property
    def parameters(self) -> int:
        return _elements(self.tensors)

    @property
    def matrices(self) -> int:
        """Parameters of the layers' matrices: what products under bfloat16 make a copy of."""
        return _elements({name: shape for name, shape in self.tensors.items() if _is_linear(name, shape)})

    def adapter(self, r: int, target_modules: Literal["all-linear"] | Sequence[str]) -> int:
        """Parameters of A [r, in] and B [out, r] beside the layers that `model.lora` names."""
        return r * sum(sum(shape) for name, shape in self.tensors.items() if _adapted(name, shape, target_modules))


def shapes_of(path: str, folder: Path | None) -> Shapes | str:
    """Of `model.path`, whose local folder is `folder` (None: a built-in model, or not here), or why they are not
    known."""
    if path in BUILTIN_MODELS:
        return of_config(TINY if path == BUILTIN_MODELS[0] else SMOLLM2)
    if folder is None and path in PUBLISHED:
        return of_config(PUBLISHED[path])
    if folder is None:
        return "the model is not on this machine"
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return f"{folder / 'config.json'} cannot be read"
    return of_config(config, _in_files(folder))


def of_config(config: Any, tensors: Mapping[str, Shape] | None = None) -> Shapes | str:
    """config: what config.json holds. tensors: what the files hold; None: by formula, where there is one."""
    if not isinstance(config, dict):
        return "config.json is not a mapping"
    if other := [key for key in ("text_config", "quantization_config") if config.get(key)]:
        return f"config.json has a {other[0]}: not all that the files hold is loaded, or not as it lies there"
    keys = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    numbers = [config.get(key) for key in keys]
    for key, number in zip(keys, numbers, strict=True):
        if not isinstance(number, int) or number < 1:
            return f"config.json has no {key}"
    layers, hidden, intermediate, heads, vocabulary = (int(number or 0) for number in numbers)
    tied = config.get("tie_word_embeddings", False)
    if tensors is None:
        if config.get("model_type") not in WRITTEN_DOWN:
            return f"there are no safetensors files, and no formula for model_type {config.get('model_type')!r}"
        tensors = {}
    result = Shapes(
        tensors={name: shape for name, shape in tensors.items() if not (tied and name == "lm_head.weight")},
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocabulary=vocabulary,
        longest=config.get("max_position_embeddings"),
    )
    return result if tensors else _by_formula(result, config, tied=tied)


def _by_formula(of: Shapes, config: Mapping[str, Any], *, tied: bool) -> Shapes:
    kind = config["model_type"]
    q, kv = of.heads * of.head_dim, of.kv_heads * of.head_dim
    linear = {
        "self_attn.q_proj": (q, of.hidden),
        "self_attn.k_proj": (kv, of.hidden),
        "self_attn.v_proj": (kv, of.hidden),
        "self_attn.o_proj": (of.hidden, q),
        "mlp.gate_proj": (of.intermediate, of.hidden),
        "mlp.up_proj": (of.intermediate, of.hidden),
        "mlp.down_proj": (of.hidden, of.intermediate),
    }
    layer: dict[str, Shape] = {f"{name}.weight": shape for name, shape in linear.items()}
    layer |= {f"{name}.weight": (of.hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    if kind == "qwen3":
        layer |= {f"self_attn.{name}.weight": (of.head_dim,) for name in ("q_norm", "k_norm")}
    biased = set()
    if config.get("attention_bias") or kind == "qwen2":
        biased |= {f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")}
    if config.get("attention_bias") and kind != "qwen2":
        biased.add("self_attn.o_proj")
    if config.get("mlp_bias"):
        biased |= {name for name in linear if name.startswith("mlp.")}
    layer |= {f"{name}.bias": linear[name][:1] for name in biased}
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": (of.vocabulary, of.hidden)}
    for index in range(of.layers):
        tensors |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    tensors["model.norm.weight"] = (of.hidden,)
    if not tied:
        tensors["lm_head.weight"] = (of.vocabulary, of.hidden)
    return replace(of, tensors=tensors)


def _in_files(folder: Path) -> dict[str, Shape] | None:
    """The tensors of the files that transformers loads; None: there are none in safetensors, or they cannot be read."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    tensors: dict[str, Shape] = {}
    try:
        if index.is_file():
            files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        else:
            files = ["model.safetensors"]
        for name in files:
            with safe_open(folder / name, framework="numpy") as file:
                tensors |= {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        return None
    return tensors or None


def _elements(tensors: Mapping[str, Shape]) -> int:
    return sum(math.prod(shape) for shape in tensors.values())


def _is_linear(name: str, shape: Shape) -> bool:
    return len(shape) == 2 and name.endswith(".weight") and not any(word in name for word in EMBEDDINGS)


def _adapted(name: str, shape: Shape, target_modules: Literal["all-linear"] | Sequence[str]) -> bool:
    if isinstance(target_modules, str):
        return _is_linear(name, shape)
    module = name.removesuffix(".weight")
    return len(shape) == 2 and module != name and any(module == t or module.endswith(f".{t}") for t in target_modules)
