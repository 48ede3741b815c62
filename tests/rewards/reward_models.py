"""Reward models that are made in a test: tiny, random, and with the traps that real ones have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

LETTERS = ["<end>", "<user>", "<assistant>", *map(chr, range(32, 127))]
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}<end>"
    "{% endfor %}"
)


def make(
    folder: Path,
    *,
    labels: int = 1,
    template: str | None = TEMPLATE,
    causal: bool = False,
    positions: int = 4096,
    **config: Any,
) -> Path:
    """A model of 16 wide layers, with a letter a token, whose padding is the token that ends each message."""
    torch.manual_seed(7)
    settings = LlamaConfig(
        vocab_size=len(LETTERS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        num_labels=labels,
        pad_token_id=LETTERS.index("<end>"),
        bos_token_id=None,
        eos_token_id=LETTERS.index("<end>"),
        initializer_range=0.5,
        **config,
    )
    model = LlamaForCausalLM(settings) if causal else LlamaForSequenceClassification(settings)
    model.save_pretrained(folder)
    letters = Tokenizer(WordLevel({letter: at for at, letter in enumerate(LETTERS)}, unk_token="?"))
    letters.pre_tokenizer = Split("", "isolated")
    special = {"eos_token": "<end>", "pad_token": "<end>", "additional_special_tokens": ["<user>", "<assistant>"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, **special)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def alone(folder: Path, text: str) -> float:
    """What the model says of a text by itself, read off its own outputs: no padding, the last token."""
    model = LlamaForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    token_ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    with torch.inference_mode():
        hidden = model.model(token_ids).last_hidden_state[0, -1]
        return float(model.score(hidden))
