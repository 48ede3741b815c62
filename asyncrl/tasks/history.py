"""A conversation that goes on, token for token as it was sampled.

A chat template turns messages into text, a tokenizer text into ids; neither gives back the ids that a model sampled:
the same text has other ids, and a character may be split between two answers. So what was sampled stays, and only what
comes after it is rendered: the template is given the whole conversation, and if its text begins with the text so far,
the rest of it is encoded and put behind the ids so far. If it does not, because the template rewrites old turns (drops
thoughts, trims white space), the conversation is encoded anew; what was sampled before is then trained as it was
sampled, in a segment of its own (`collectors/segments.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncrl.tasks.base import Message
from asyncrl.tasks.chat import NO_ARGUMENTS, Tools, template_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXT = 16
"""Tokens before a text that it is decoded behind. Decoders look at one; to decode all of a long conversation would take
longer than all else that is done for a turn."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the model has it, and the text that these ids stand for."""

    token_ids: tuple[int, ...]
    text: str


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    tools: Tools | None = None,
    arguments: Mapping[str, Any] = NO_ARGUMENTS,
) -> Rendered:
    """The conversation up to the mark that opens the next answer. Raises TaskError: see `chat.template_text`."""
    text = template_text(tokenizer, messages, tools=tools, arguments=arguments)
    # The template writes the special tokens itself: adding the tokenizer's own would double the first one.
    return Rendered(_ids(tokenizer, text), text)


def answered(tokenizer: PreTrainedTokenizerBase, before: Rendered, token_ids: Sequence[int]) -> Rendered:
    """With the answer that was sampled after it."""
    whole = (*before.token_ids, *token_ids)
    return Rendered(whole, before.text + _text_after(tokenizer, before.token_ids, whole))


def went_on(
    tokenizer: PreTrainedTokenizerBase,
    before: Rendered,
    messages: Sequence[Message],
    *,
    tools: Tools | None = None,
    arguments: Mapping[str, Any] = NO_ARGUMENTS,
) -> Rendered:
    """The conversation `messages` up to the mark that opens the next answer, where `before` is its beginning, the last
    answer included. Messages of the model have as content the text it sampled, without the end token.

    The ids begin with those of `before` exactly if the template leaves its text as it was. Raises TaskError.
    """
    text = template_text(tokenizer, messages, tools=tools, arguments=arguments)
    if text.startswith(before.text):
        rest = text[len(before.text) :]
        whole = (*before.token_ids, *_ids(tokenizer, rest))
        # A tokenizer that puts a space before whatever it encodes would change what the model reads.
        if _text_after(tokenizer, before.token_ids, whole) == rest:
            return Rendered(whole, text)
    return Rendered(_ids(tokenizer, text), text)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def _text_after(tokenizer: PreTrainedTokenizerBase, before: Sequence[int], whole: Sequence[int]) -> str:
    """The text of whole[len(before):]. Not decoded alone: some decoders drop a space where a text begins."""
    begin = max(0, len(before) - CONTEXT)
    start, text = _decoded(tokenizer, before[begin:]), _decoded(tokenizer, whole[begin:])
    return text[len(start) :] if text.startswith(start) else _decoded(tokenizer, whole[len(before) :])


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    # As an array: of a list transformers looks at the type of every element.
    plain = np.array(ids, dtype=np.int64)
    return str(tokenizer.decode(plain, skip_special_tokens=False, clean_up_tokenization_spaces=False))
