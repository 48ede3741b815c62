"""A tokenizer of which each token is one character: what an answer says can be read from its ids."""

from __future__ import annotations

import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

LETTERS = string.ascii_letters + string.digits[:9]
"""Of the 61 ids of the tiny models."""


def letters() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({letter: id for id, letter in enumerate(LETTERS)}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def spelt(ids: list[int]) -> str:
    """The text of these ids."""
    return "".join(LETTERS[id] for id in ids)


def save_letters(folder: Path) -> None:
    """As the tokenizer of a model's folder."""
    PreTrainedTokenizerFast(tokenizer_object=letters()).save_pretrained(folder)
