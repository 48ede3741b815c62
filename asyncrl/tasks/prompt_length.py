"""How many tokens a prompt may have, and which rows of files have more: the one rule for rows that are looked at before
a run and for tickets."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from asyncrl.tasks.base import Message, Row, TaskError
from asyncrl.tasks.chat import render
from asyncrl.tasks.tools import row_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from asyncrl.data.rows import Prompt, Record


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """The model's tokenizer, and how many tokens it takes, prompt and answer; None: any. given: by the recipe."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int | None
    given: bool

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, *, own: int | None, given: int | None) -> PromptLimit:
        """own: what the model's configuration says; given: `model.max_length`."""
        if own is not None and (given is None or own < given):
            return cls(tokenizer, own, given=False)
        return cls(tokenizer, given, given=given is not None)

    @classmethod
    def load(cls, model_path: Path, *, given: int | None, trust_remote_code: bool) -> PromptLimit:
        """Of the model in a folder. Raises what transformers raises."""
        # Here: importing it takes seconds, and a simulated collector has no use for it.
        from transformers import AutoConfig, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        own = getattr(config.get_text_config(), "max_position_embeddings", None)
        return cls.of(tokenizer, own=own, given=given)

    @property
    def longest(self) -> int | None:
        """The most tokens of a prompt: an answer has at least one."""
        return None if self.max_length is None else self.max_length - 1

    @property
    def said(self) -> str:
        """What is too long for what, and what to do."""
        if self.given:
            return f"model.max_length is {self.max_length}, with the answer: raise it, or shorten the row"
        return f"the model takes {self.max_length}, with the answer: shorten the row"


class RowTokens:
    """The tokens of a task's rows. Implements `data.lengths.Tokens`."""

    def __init__(
        self,
        limit: PromptLimit,
        longest: int,
        *,
        row: Callable[[Record], Row],
        messages: Callable[[Row], list[Message]],
        arguments: Mapping[str, Any],
    ) -> None:
        """longest: of `limit`. row, messages: as the task makes them. arguments: for the chat template."""
        self.limit, self.said = longest, limit.said
        self._tokenizer = limit.tokenizer
        self._row, self._messages, self._arguments = row, messages, arguments
        self._overhead = lru_cache(maxsize=1024)(self._overhead_of)  # data sets have few shapes; or a shape a row

    def key(self) -> str:
        """A hash of the tokenizer, its template with the arguments, and what a task puts before a row; the limit."""
        tokenizer = self._tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        words = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
        alone = self._messages(Row("", "a"))
        parts = [type(tokenizer).__name__, words, tokenizer.chat_template, dict(self._arguments), alone]
        digest = xxhash.xxh3_128_hexdigest(json.dumps([*parts, tokenizer.special_tokens_map], default=str).encode())
        return f"{digest}, at most {self.limit}"

    def overhead(self, record: Record) -> int | None:
        """Tokens of the same prompt with nothing said in it, or one letter, which every template takes."""
        shape = "" if isinstance(record.prompt, str) else "\n".join(message["role"] for message in record.prompt)
        return self._overhead(shape, json.dumps(record.info.get("tools")))

    def count(self, record: Record) -> int | None:
        row = self._row(record)
        try:
            return len(
                render(self._tokenizer, self._messages(row), tools=row_tools(row) or None, arguments=self._arguments)
            )
        except TaskError:  # fails its own tickets, by name
            return None

    def _overhead_of(self, roles: str, tools: str) -> int | None:
        from asyncrl.data.rows import Record

        prompt: Prompt = [{"role": role, "content": "a"} for role in roles.split("\n")] if roles else "a"
        named = json.loads(tools)
        return self.count(Record("", prompt, None, {"tools": named} if named else {}))
