"""From data files to examples: conversations rendered by the model's own chat template, with the loss where the model
answers, exactly.

An answer's tokens are found by rendering twice: up to the mark that opens the answer (what the model is given when it
is asked), and with the answer. The first must be the beginning of the second, token for token, and both the beginning
of the whole; a template for which that does not hold would be trained at places other than those it is used at, so the
row is refused. Of what the template writes after the answer, the loss is on the token that ends it and on nothing else:
the model never writes the rest itself.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, cast

import xxhash

from asyncrl.data.conversations import Conversation, Split
from asyncrl.data.errors import DataError, RowError
from asyncrl.learners.sft import Example
from asyncrl.tasks.base import Message, TaskError
from asyncrl.tasks.chat import NO_ARGUMENTS, conversation, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Longest:
    """How many tokens an example may have, and what to say to a person whose row has more."""

    tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class Examples:
    """What is trained and what is measured. `skipped`: rows left out, by reason; `fingerprint`: of all token ids, flags
    and their order: 32 hex digits."""

    train: Sequence[Example]
    heldout: Sequence[Example]
    skipped: Mapping[str, int]
    fingerprint: str


def make_examples(
    split: Split,
    tokenizer: PreTrainedTokenizerBase,
    *,
    system_prompt: str | None,
    template_args: Mapping[str, Any],
    ends: Sequence[int],
    longest: Longest,
    heldout_rows: int,
) -> Examples:
    """Render all training rows and the first `heldout_rows` held-out ones. `ends`: ids that end an answer.
    `template_args`: what the chat template gets besides messages.

    Raises TaskError: no chat template; DataError: a row that cannot be used, under the policy that refuses it, or no
    row is left.
    """

    def rendered(rows: Sequence[Conversation]) -> list[Example]:
        examples = []
        for row in rows:
            try:
                examples.append(
                    make_example(
                        row,
                        tokenizer,
                        system_prompt=system_prompt,
                        ends=ends,
                        longest=longest,
                        template_args=template_args,
                    )
                )
            except RowError as error:
                split.bad(error)
        if not examples:
            raise DataError(f"no row is left to train and to measure: {split.bad}")
        return examples

    log.info("rendering %d rows", len(split.train) + min(heldout_rows, len(split.heldout)))
    train, heldout = rendered(split.train), rendered(split.heldout[:heldout_rows])
    digest = xxhash.xxh3_128()
    for side in (train, heldout):
        for example in side:
            digest.update(len(example.token_ids).to_bytes(8))
            digest.update(array("i", example.token_ids))
            digest.update(bytes(example.trained))
        digest.update(b"side")
    return Examples(train, heldout, split.bad.by_reason, digest.hexdigest())


def make_example(
    row: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    *,
    system_prompt: str | None,
    ends: Sequence[int],
    longest: Longest,
    template_args: Mapping[str, Any] = NO_ARGUMENTS,
) -> Example:
    """One conversation; int32 ids and one byte a flag, which is what large data sets are kept in.

    Raises TaskError where the tokenizer has no chat template, RowError for what is wrong with this row.
    """
    messages = conversation(cast("list[Message]", list(row.messages)), system_prompt)
    try:
        whole = render(tokenizer, messages, answer_follows=False, arguments=template_args)
        if len(whole) > longest.tokens:
            raise RowError("too-long", f"{row.where}: {len(whole)} tokens, but {longest.reason}")
        trained = bytearray(len(whole))
        for n, message in enumerate(messages):
            if message["role"] == "assistant":
                asked = render(tokenizer, messages[:n], arguments=template_args)
                answered = whole
                if n + 1 < len(messages):
                    answered = render(tokenizer, messages[: n + 1], answer_follows=False, arguments=template_args)
                _require_beginning(tokenizer, row, n, asked, answered)
                _require_beginning(tokenizer, row, n + 1, answered, whole)
                end = next((at for at in reversed(range(len(asked), len(answered))) if answered[at] in ends), None)
                if end is None:
                    raise RowError(
                        "chat-template",
                        f"{row.where}: the chat template puts no token that ends an answer "
                        f"({tokenizer.decode(list(ends))}) behind message {n + 1}: the model would never learn to stop",
                    )
                trained[len(asked) : end + 1] = b"\1" * (end + 1 - len(asked))
    except TaskError as error:
        if not tokenizer.chat_template:
            raise
        raise RowError("chat-template", f"{row.where}: {error}") from error
    return Example(array("i", whole), trained)


def _require_beginning(
    tokenizer: PreTrainedTokenizerBase, row: Conversation, messages: int, part: list[int], whole: list[int]
) -> None:
    """Raise RowError unless the rendering of the first `messages` messages begins the rendering of more of them."""
    if whole[: len(part)] == part:
        return
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(part, whole, strict=False)))
    alone, followed = (tokenizer.decode(ids[max(0, same - 2) : same + 6]) for ids in (part, whole))
    raise RowError(
        "chat-template",
        f"{row.where}: the chat template writes the first {messages} messages otherwise when more follows "
        f"({alone!r} becomes {followed!r}).\nUse a template that only appends; an answer that begins with white "
        "space, which may melt into what stands before it, can be trimmed.",
    )
