"""Tiny random models of several architectures, and a replay that knows nothing of slots, padding or batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import (
    Cache,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from asyncrl.collectors.engines.base import Completion, Request, Sampling
from asyncrl.staleness import Weights
from asyncrl.weights.base import StagedWeights
from asyncrl.weights.manifest import combined_checksum, model_tensors

VOCABULARY = 61

torch.set_num_threads(1)

# A large initializer makes the distributions sharp enough that a wrong mask, position or version cannot hide.
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
}


def _gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.3)
    )


def _gemma2() -> PreTrainedModel:
    # Caps the scores of attention and the logits, which only the eager attention does.
    config = Gemma2Config(**_SHAPE, head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"])
    config._attn_implementation = "eager"
    return Gemma2ForCausalLM(config)


def _gemma3() -> PreTrainedModel:
    # The window is shorter than the sequences of the tests, so that sliding layers really slide.
    layers = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**_SHAPE, head_dim=8, sliding_window=6, layer_types=layers))


ARCHITECTURES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SHAPE, head_dim=8, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_SHAPE)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SHAPE, tie_word_embeddings=False)),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
}


def make_model(architecture: str = "qwen3", *, seed: int = 0) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ARCHITECTURES[architecture]().eval().requires_grad_(False)


def staged(model: PreTrainedModel, lineage: int, version: int) -> StagedWeights:
    """What a receiver would hand over: a private copy of `model`'s tensors under this name."""
    tensors, tied = model_tensors(model)
    return StagedWeights(
        weights=Weights(lineage, version),
        tensors={name: tensor.clone() for name, tensor in tensors},
        tied=tied,
        checksum=combined_checksum(tensors),
    )


def request(id: str, prompt: Sequence[int] = (1, 2, 3, 4, 5), *, seed: int = 0, **sampling: object) -> Request:
    return Request(
        id=id,
        group=id,
        session=id,
        token_ids=tuple(prompt),
        sampling=Sampling(**{"max_tokens": 12, **sampling}),  # type: ignore[arg-type]
        seed=seed,
    )


@torch.inference_mode()
def replay(models: dict[int, PreTrainedModel], prompt: Sequence[int], completion: Completion) -> torch.Tensor:
    """Log-probability of each sampled token at temperature 1, one unpadded token at a time: the weights that sampled
    token t also computed the keys and values of token t - 1, and older ones stay as they are (`keep`)."""
    cache: Cache = DynamicCache()
    feed, found = list(prompt), []
    for token, version in zip(completion.token_ids.tolist(), completion.versions.tolist(), strict=True):
        logits = models[version](input_ids=torch.tensor([feed]), cache=cache, use_cache=True).logits[0, -1]
        found.append(logits.log_softmax(-1)[token])
        feed = [token]
    return torch.stack(found)


@torch.inference_mode()
def full_forward(
    model: PreTrainedModel, prompt: Sequence[int], completion: Completion, *, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probability of each sampled token from one plain forward over the whole sequence, without a cache."""
    tokens = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
    logits = model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(1, tokens[0, len(prompt) :, None]).squeeze(1)
