"""A tiny real model under a collector: its folder, weights of it over shared memory, what its tokens must satisfy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import to_builtins
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3ForCausalLM

from asyncrl.learners.forward import token_logprobs
from asyncrl.learners.tiny import tiny_config
from asyncrl.learners.tiny_tokenizer import build_tokenizer
from asyncrl.schema import Packed
from asyncrl.staleness import Weights
from asyncrl.weights.image import Images
from asyncrl.weights.manifest import model_tensors
from asyncrl.weights.reach import here
from asyncrl.weights.shm import shm_offer

MAX_LENGTH = 48

torch.set_num_threads(1)


def save_model(folder: Path) -> Path:
    """The tiny architecture with random weights: it answers noise, of every length, mostly without an end."""
    tokenizer = build_tokenizer(MAX_LENGTH)
    torch.manual_seed(0)
    Qwen3ForCausalLM(tiny_config(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def versions_of(
    model_path: Path, publisher: Images
) -> tuple[dict[Weights, PreTrainedModel], Callable[[Weights], Mapping[str, Any]]]:
    """Publishes another random model for each name asked for, and keeps them all."""
    kept: dict[Weights, PreTrainedModel] = {}
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()  # here: an engine loads later

    def publish(weights: Weights) -> Mapping[str, Any]:
        model = copy.deepcopy(base)
        generator = torch.Generator().manual_seed(weights.version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        kept[weights] = model
        tensors, tied = model_tensors(model)
        image = publisher.write(weights, tensors, tied=tied)
        return {"place": to_builtins(here()), "offers": [shm_offer(image)]}

    return kept, publish


def check_logprobs(packed: Packed, kept: Mapping[Weights, PreTrainedModel]) -> set[int]:
    """The recorded logprobs of rows of one version must be those of its weights. Returns all versions there are."""
    mask = packed.loss_mask == 1
    seen = set(packed.versions[mask].tolist())
    for version in seen:
        with torch.no_grad():
            logprobs = token_logprobs(
                kept[Weights(1, version)],
                torch.tensor(packed.token_ids.astype(np.int64)),
                torch.tensor(packed.cu_seqlens),
            ).numpy()
        rows = np.repeat(np.arange(len(packed.rewards)), np.diff(packed.cu_seqlens))
        pure = [row for row in set(rows.tolist()) if set(packed.versions[mask & (rows == row)]) == {version}]
        own = mask & np.isin(rows, pure)
        np.testing.assert_allclose(packed.logprobs[own], logprobs[own], atol=1e-4)
    return seen
