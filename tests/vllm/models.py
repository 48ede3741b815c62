"""Small random models of shapes that vLLM's attention takes on a CPU (head_dim 32 and more), and what to compare with.

The environment of these tests has vLLM's transformers, older than the one that the other tests have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from asyncrl.collectors.engines.base import Completion, Request, Sampling
from asyncrl.collectors.engines.vllm import VllmEngine
from asyncrl.collectors.engines.vllm_base import VllmBase
from asyncrl.staleness import Weights
from asyncrl.weights.base import StagedWeights
from asyncrl.weights.manifest import combined_checksum, model_tensors

TOLERANCE = 1e-4
"""Of a logprob, nats, float32: the kernels add in another order."""

SLOTS = 4

VOCABULARY = 61

# A large initializer makes the distributions sharp enough that a wrong version, prefix or position cannot hide.
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
}


def _gemma3() -> PreTrainedModel:
    layers = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**_SHAPE, head_dim=32, query_pre_attn_scalar=32, sliding_window=64, layer_types=layers)
    )


ARCHITECTURES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SHAPE, head_dim=32, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**{**_SHAPE, "num_attention_heads": 2}, tie_word_embeddings=False)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SHAPE, head_dim=32, tie_word_embeddings=False)),
    "gemma3": _gemma3,
}


def make_model(architecture: str, *, seed: int) -> PreTrainedModel:
    """Random in every tensor, biases and norms included: one that stayed as it was would be seen."""
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = ARCHITECTURES[architecture]().eval().requires_grad_(False)
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        return model


def make_engine(path: Path, *, slots: int = SLOTS, dtype: str = "float32") -> VllmEngine:
    return VllmEngine(
        "e0",
        path,
        slots=slots,
        max_length=None,
        dtype=dtype,
        trust_remote_code=False,
        gpu_memory_utilization=0.9,
        kv_cache_memory_bytes=256 << 20,
        enforce_eager=None,
        extra={},
    )


def next_weights(engine: VllmBase) -> Weights:
    """A version that is newer than the one served."""
    return Weights(1, 1) if engine.serving is None else Weights(1, engine.serving.version + 1)


def staged(model: PreTrainedModel, weights: Weights) -> StagedWeights:
    """What a receiver would hand over: a private copy of `model`'s tensors under this name."""
    tensors, tied = model_tensors(model)
    copies = {name: tensor.clone() for name, tensor in tensors}
    return StagedWeights(weights, copies, tied, combined_checksum(tensors))


def request(id: str, prompt: Sequence[int] = (1, 2, 3, 4, 5), *, seed: int = 0, **sampling: Any) -> Request:
    return Request(
        id=id,
        group=id,
        session=id,
        token_ids=tuple(prompt),
        sampling=Sampling(**{"max_tokens": 12, **sampling}),
        seed=seed,
    )


@torch.inference_mode()
def full_forward(
    model: PreTrainedModel, prompt: Sequence[int], completion: Completion, *, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probability of each sampled token from one plain forward over the whole sequence, without a cache."""
    tokens = torch.from_numpy(completion.token_ids.astype("int64"))
    logits = logits_of(model, prompt, completion)
    return (logits / temperature).log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)


@torch.inference_mode()
def logits_of(model: PreTrainedModel, prompt: Sequence[int], completion: Completion) -> torch.Tensor:
    """Logits from which each token was sampled, float32 [T, vocabulary], of one plain forward."""
    tokens = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
    return model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float()


@torch.inference_mode()
def replay(models: dict[int, PreTrainedModel], prompt: Sequence[int], completion: Completion) -> torch.Tensor:
    """The same over keys and values as `keep` has them: the weights that sampled token t also computed those of token
    t - 1, and older ones stay as they are."""
    cache = DynamicCache()
    feed, found = list(prompt), []
    for token, version in zip(completion.token_ids.tolist(), completion.versions.tolist(), strict=True):
        logits = models[version](input_ids=torch.tensor([feed]), past_key_values=cache, use_cache=True).logits[0, -1]
        found.append(logits.log_softmax(-1)[token])
        feed = [token]
    return torch.stack(found)
