"""The conversations of an episode, token for token.

An agent sends all of a conversation with every call. What the policy wrote in it comes back as text, whose tokens need
not be those that were sampled. So the answer that a conversation goes on from is looked up, and what follows it is
rendered behind the tokens as they were (`asyncrl.tasks.history`). A conversation that goes on from no answer of this
episode, because the agent changed or shortened it, is rendered anew: a segment of its own, as are two answers to the
same messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncrl.collectors.endpoint.asked import Incoming
from asyncrl.collectors.endpoint.messages import Meaning, for_template, meaning
from asyncrl.tasks.base import Message
from asyncrl.tasks.chat import NO_ARGUMENTS, Shown, Tools
from asyncrl.tasks.history import Rendered, answered, rendered, went_on

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation that wants an answer. meanings: of its messages; messages: what the template was given."""

    meanings: tuple[Meaning, ...]
    messages: tuple[Message, ...]
    rendered: Rendered


@dataclass(frozen=True, slots=True)
class _Answer:
    """messages and rendered: the conversation with it."""

    messages: tuple[Message, ...]
    rendered: Rendered


class Conversations:
    """What was asked and answered so far. Raises what the functions of `tasks.history` raise (TaskError).

    arguments: what the chat template gets besides messages and tools."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, arguments: Mapping[str, Any] = NO_ARGUMENTS) -> None:
        self._tokenizer, self._arguments = tokenizer, arguments
        self._answers: dict[tuple[Meaning, ...], _Answer] = {}  # by the conversation up to it; the newest of equal ones
        self._written: dict[Meaning, str] = {}  # what an answer means -> what the policy wrote
        self.newest: tuple[Message, ...] = ()  # the conversation of the newest answer, itself included

    def question(self, messages: Sequence[Incoming], tools: Tools | None) -> Question:
        """The conversation up to the mark that opens the next answer. Raises ApiError for content that is no text."""
        meanings = tuple(map(meaning, messages))
        given = tuple(self._as_written(*pair) for pair in zip(messages, meanings, strict=True))
        shown: Shown = {"tools": tools, "arguments": self._arguments}
        for end in range(len(meanings), 0, -1):
            found = self._answers.get(meanings[:end]) if meanings[end - 1].role == "assistant" else None
            if found is not None:
                whole = (*found.messages, *given[end:])
                return Question(meanings, whole, went_on(self._tokenizer, found.rendered, whole, **shown))
        return Question(meanings, given, rendered(self._tokenizer, given, **shown))

    def answer(self, question: Question, token_ids: Sequence[int], *, written: str, given: Meaning) -> None:
        """Keep an answer. written: its text, without the end token; given: what the client got of it."""
        self._written[given] = written
        self.newest = (*question.messages, {"role": "assistant", "content": written})
        self._answers[(*question.meanings, given)] = _Answer(
            self.newest, answered(self._tokenizer, question.rendered, token_ids)
        )

    def _as_written(self, message: Incoming, said: Meaning) -> Message:
        """A message of the policy's as it wrote it, calls included; any other as it came."""
        if said.role == "assistant" and (written := self._written.get(said)) is not None:
            return {"role": "assistant", "content": written}
        return for_template(message)
