"""Activation checkpointing: the same gradients, from the inputs of layers alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from asyncrl.config.recipe import Lora
from asyncrl.learners import recompute
from asyncrl.learners.attention import current_layout, laid_out
from asyncrl.learners.forward import token_logprobs
from asyncrl.learners.lora import attach
from asyncrl.learners.model import ModelError, load_model
from asyncrl.learners.recompute import recompute_layers

LIMIT_S = 120.0

PACKS = (
    ([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 9, 8], [7, 5]),  # the second begins as the first
    ([5, 6, 7, 8, 9, 1, 2, 3, 4, 11, 12, 13, 14, 15], [3, 8, 3]),
)
"""Micro-batches of different layouts, tokens and their lengths."""


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """Of both packs: both forward passes first, so that neither backward pass is in the layout of the one before it."""
    model.zero_grad()
    losses = [
        token_logprobs(model, torch.tensor(ids), torch.tensor([0, *np.cumsum(lengths)]), share_prefixes=True)[1:].sum()
        for ids, lengths in PACKS
    ]
    for loss in losses:
        torch.autograd.backward(loss)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("attn", ["auto", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_computed_again_gives_the_same_gradients(model_path: Path, dtype: str, attn: str) -> None:
    model = load_model(model_path, dtype, attn)
    expected = gradients(model)
    recompute_layers(model)
    assert equal(gradients(model), expected)
    assert max(float(g.abs().max()) for g in expected.values()) > 1e-2


def test_adapters_get_the_same_gradients_and_the_frozen_base_none(model_path: Path) -> None:
    model = load_model(model_path, "float32", "auto")
    attach(model, Lora(r=2, alpha=4), seed=0, base="base")
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(1))
    expected = gradients(model)
    recompute_layers(model)
    assert equal(gradients(model), expected)
    assert expected
    assert all(".lora_" in name for name in expected)


def test_layers_are_computed_twice_in_a_pass_with_gradients_and_once_in_one_without(model_path: Path) -> None:
    model = load_model(model_path, "float32", "auto")
    calls: list[str] = []
    for layer in model.model.layers:
        layer.input_layernorm.register_forward_hook(lambda *_: calls.append("norm"))
    recompute_layers(model)
    ids, lengths = PACKS[0]
    loss = token_logprobs(model, torch.tensor(ids), torch.tensor([0, *np.cumsum(lengths)])).sum()
    assert len(calls) == len(model.model.layers)
    torch.autograd.backward(loss)
    assert len(calls) == 2 * len(model.model.layers)
    with torch.no_grad():
        token_logprobs(model, torch.tensor(ids), torch.tensor([0, *np.cumsum(lengths)]))
    assert len(calls) == 3 * len(model.model.layers)


def test_without_the_layers_own_pack_the_backward_pass_fails(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the context of the backward pass is not that of the forward pass."""
    monkeypatch.setattr(recompute, "laid_out", lambda _: laid_out(current_layout()))
    model = load_model(model_path, "float32", "auto")
    recompute_layers(model)
    with pytest.raises(RuntimeError, match="works only inside"):
        gradients(model)


def test_a_model_that_does_not_name_its_layers_is_refused(model_path: Path) -> None:
    model = load_model(model_path, "float32", "auto")
    model._no_split_modules = set()
    with pytest.raises(
        ModelError, match=r"learner\.gradient_checkpointing works on decoder layers, and Qwen3ForCausalLM does not say"
    ):
        recompute_layers(model)


@pytest.mark.slow
def test_a_pass_needs_less_than_half_of_the_memory(tmp_path: Path) -> None:
    """The peak of a process beyond what it had before; the control is the same pass that keeps everything."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    said = subprocess.check_output([sys.executable, __file__, str(tmp_path)], timeout=LIMIT_S)
    inputs, everything = map(int, said.split())
    assert 0 < inputs < 0.5 * everything


def _peak() -> int:
    """Largest resident size of this process so far, KiB."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def main() -> None:
    """KiB that a pass of 4,096 tokens needs, first computing again, then keeping everything."""
    torch.set_num_threads(1)
    model = load_model(sys.argv[1], "float32", "auto")
    plain = [layer.forward for layer in model.model.layers]

    def step(tokens: int) -> int:
        cu_seqlens = torch.arange(0, tokens + 1, 64)
        torch.autograd.backward(token_logprobs(model, torch.arange(tokens) % 64, cu_seqlens).sum())
        return _peak()

    before = step(64)  # gradients, and whatever else is there from the first pass on
    recompute_layers(model)
    inputs = step(4096)
    for layer, forward in zip(model.model.layers, plain, strict=True):
        layer.forward = forward
    sys.stdout.write(f"{inputs - before} {step(4096) - before}\n")


if __name__ == "__main__":
    main()
