"""What a model's tensors are, without loading it, against models that transformers makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from asyncrl.learners.shapes import PUBLISHED, SMOLLM2, TINY, Shapes, of_config, shapes_of

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS: list[tuple[Any, Any, dict[str, Any]]] = [
    (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    (MistralConfig, MistralForCausalLM, {}),
    (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "tie_word_embeddings": False}),
]


def shapes(found: Shapes | str) -> Shapes:
    assert not isinstance(found, str), found
    return found


def real(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("config", "model", "more"), MODELS)
def test_the_formula_names_every_parameter_with_its_shape(config: Any, model: Any, more: dict[str, Any]) -> None:
    made = config(**SHAPE, **more)
    with torch.device("meta"):
        expected = real(model(made))
    assert shapes(of_config(made.to_dict())).tensors == expected


@pytest.mark.parametrize(("config", "parameters"), [(TINY, 140_224), (SMOLLM2, 134_515_008)])
def test_the_built_in_models_have_their_parameters(config: dict[str, Any], parameters: int) -> None:
    assert shapes(of_config(config)).parameters == parameters


@pytest.mark.parametrize("sizes", ["1GB", "20KB"])  # one file; several and an index
def test_files_say_what_is_in_them(tmp_path: Path, sizes: str) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    model.save_pretrained(tmp_path, max_shard_size=sizes)
    assert (tmp_path / "model.safetensors.index.json").exists() == (sizes == "20KB")
    assert shapes(shapes_of("./model", tmp_path)).tensors == real(model)


def test_files_of_an_architecture_without_a_formula_are_read_too(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4))
    model.save_pretrained(tmp_path)
    found = shapes_of("./model", tmp_path)
    assert isinstance(found, str)  # its configuration has other names for the widths: nothing is guessed
    assert "num_hidden_layers" in found


def test_an_adapter_has_the_parameters_that_peft_trains() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    found = shapes(of_config(model.config.to_dict()))
    for targets in ("all-linear", ["q_proj", "down_proj"]):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))
        inject_adapter_in_model(LoraConfig(r=3, target_modules=targets, task_type="CAUSAL_LM"), model)
        trained = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
        assert found.adapter(3, targets) == trained


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ([], "not a mapping"),
        ({}, "num_hidden_layers"),
        ({**SHAPE, "hidden_size": "32"}, "hidden_size"),
        ({**SHAPE, "model_type": "novel"}, "novel"),
        ({**SHAPE, "model_type": "llama", "quantization_config": {"bits": 4}}, "quantization_config"),
        ({**SHAPE, "model_type": "llama", "text_config": {"hidden_size": 8}}, "text_config"),
    ],
)
def test_what_is_not_known_is_said_and_not_guessed(tmp_path: Path, config: Any, why: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"no such file")
    found = shapes_of("./model", tmp_path)
    assert isinstance(found, str)
    assert why in found


@pytest.mark.parametrize(
    ("size", "parameters"),
    [("0.5B", 494_032_768), ("1.5B", 1_543_714_304), ("3B", 3_085_938_688), ("7B", 7_615_616_512)],
)
def test_models_of_the_hub_are_known_without_them(size: str, parameters: int) -> None:
    """The numbers that the model cards have, 0.49, 1.54, 3.09 and 7.61 billion, to the last parameter."""
    assert shapes(shapes_of(f"Qwen/Qwen2.5-{size}-Instruct", None)).parameters == parameters
    assert len(PUBLISHED) == 4
