"""The tokenizer of the built-in tiny model: one token per byte, and eight marks.

Byte-level BPE without a single merge, so that id = byte for 0-255, any UTF-8 text survives encode and decode, and
nothing has to be trained or downloaded. Each role mark is one token.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<|end|>"
PAD = "<|pad|>"
MARKS = (PAD, END, "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|think|>", "<|/think|>")
"""Ids 256-263 in this order. The last four have no user in the default task; they are there so that conversations
with a system prompt, tools or thoughts need no other vocabulary. Of a tool the model reads its name and those of its
arguments, as a system message would have them: a byte of prompt is a token."""

VOCABULARY = 256 + len(MARKS)

CHAT_TEMPLATE = (
    "{%- if tools -%}"
    "{{- '<|system|>' -}}"
    "{%- for tool in tools -%}"
    "{{- tool['function']['name'] ~ '(' ~ tool['function']['parameters']['properties'] | join(', ') ~ ')' -}}"
    "{%- if not loop.last -%}{{- ' ' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{{- '<|end|>' -}}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ('system', 'user', 'assistant', 'tool') -%}"
    "{{- raise_exception('role ' ~ message['role'] ~ ' is unknown: use system, user, assistant or tool') -}}"
    "{%- endif -%}"
    "{{- '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def byte_symbols() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte 0-255, in that order (GPT-2's table).

    Printable Latin-1 bytes stand for themselves; the 68 others are numbered from U+0100 up.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer with 264 tokens, chat template and end mark; `max_length` tokens is what its model can take."""
    vocabulary = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[mark for mark in MARKS if mark not in (END, PAD)],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
