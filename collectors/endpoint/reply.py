"""An answer as OpenAI's clients get it, whole or in chunks. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from asyncrl.collectors.endpoint.messages import Meaning, canonical
from asyncrl.collectors.engines.base import Completion
from asyncrl.rewards.tool_call_text import ToolCall
from asyncrl.tasks.tool_calls import ToolFormat, tool_calls

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """calls: what the client is asked to call, with the id of each. logprobs: as OpenAI has them, of the sampled
    tokens without the end token; None where they were not asked for."""

    id: str
    created: int  # unix seconds
    model: str
    content: str
    calls: tuple[tuple[str, ToolCall], ...]
    finish_reason: str  # stop, length or tool_calls
    prompt_tokens: int
    sampled_tokens: int
    logprobs: list[Document] | None = None

    @property
    def meaning(self) -> Meaning:
        """As it is found again in the next call's messages."""
        calls = tuple((call.name, canonical(_arguments(call))) for _, call in self.calls)
        return Meaning("assistant", self.content, calls)

    def document(self) -> Document:
        """The body of a response that is not streamed."""
        message: Document = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        if self.calls:
            message["tool_calls"] = self._tool_calls()
        choice = {"index": 0, "message": message, "logprobs": self._logprobs(), "finish_reason": self.finish_reason}
        return {**self._head("chat.completion"), "choices": [choice], "usage": self._usage()}

    def chunk(self, delta: Document) -> Document:
        """One of a stream, before the last ones."""
        return self._chunk(delta, None)

    def last_chunks(self, rest: str, *, usage: bool) -> Iterator[Document]:
        """What ends a stream. rest: of the content, what was not said yet; usage: say how many tokens there were."""
        if rest or self.logprobs is not None:
            yield self._chunk({"content": rest}, None, logprobs=self._logprobs())
        if self.calls:
            indexed = [{"index": n, **call} for n, call in enumerate(self._tool_calls())]
            yield self._chunk({"tool_calls": indexed}, None)
        yield self._chunk({}, self.finish_reason)
        if usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage()}

    def _chunk(self, delta: Document, finish_reason: str | None, *, logprobs: Document | None = None) -> Document:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> Document:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _logprobs(self) -> Document | None:
        return None if self.logprobs is None else {"content": self.logprobs, "refusal": None}

    def _tool_calls(self) -> list[Document]:
        return [
            {"id": id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call)}}
            for id, call in self.calls
        ]

    def _usage(self) -> Document:
        total = self.prompt_tokens + self.sampled_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.sampled_tokens,
            "total_tokens": total,
        }


def parsed(
    written: str, completion: Completion, form: ToolFormat | None, *, most: int | None
) -> tuple[str, list[ToolCall]]:
    """Content and calls of what the policy wrote. form: how it writes calls; None: they are not the client's to make.
    most: calls that the client takes at once. A text with a call that is none is content as a whole."""
    if completion.stopped_by:  # the answer ends with the token that completes it, which may go on behind it
        written = written[: written.rfind(completion.stopped_by)]
    if form is None:
        return written, []
    found = tool_calls(written, form)
    if found.problem or not found.calls:
        return written, []
    return found.content, list(found.calls[:most])


def call_id(turn: int, n: int) -> str:
    """Nine letters and digits, which is what the strictest of templates take; unique in an episode."""
    return f"c{turn:05d}{n:03d}"


def logprobs_of(completion: Completion, tokens: int, read: Callable[[list[int]], str]) -> list[Document]:
    """Of the first `tokens` sampled ones. read: the text of tokens."""
    found = []
    for token, logprob in zip(completion.token_ids[:tokens].tolist(), completion.logprobs.tolist(), strict=False):
        text = read([token])
        # A token that is part of a character has no text; its bytes are not told by the tokenizer either.
        bytes_ = None if "\ufffd" in text else list(text.encode())
        found.append({"token": text, "logprob": logprob, "bytes": bytes_, "top_logprobs": []})
    return found


def _arguments(call: ToolCall) -> str:
    return json.dumps(call.arguments, ensure_ascii=False)
