"""One episode at the endpoint: its calls, what was sampled for them, and what becomes of it if something fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from asyncrl.buffers.concurrency import end_all
from asyncrl.collectors.endpoint.asked import Chat
from asyncrl.collectors.endpoint.conversation import Conversations, Question
from asyncrl.collectors.endpoint.errors import ApiError
from asyncrl.collectors.endpoint.growing import GrowingText
from asyncrl.collectors.endpoint.reply import Reply, call_id, logprobs_of, parsed
from asyncrl.collectors.engines.base import Completion, Request
from asyncrl.collectors.episode import Episode, Sampler, Turn
from asyncrl.collectors.scoring import ABORTED, ENGINE_ERROR
from asyncrl.tasks.base import Message, TaskError
from asyncrl.tasks.tool_calls import ToolFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_REFUSED = 100
"""Calls after a limit, from an agent that does not look at errors, before its episode is ended."""

FLOOD = "agent_flood"

Say = Callable[[Reply, str], Awaitable[None]]
"""Hears new text of a streamed answer, and whose."""

Told = Callable[[asyncio.Future[Completion]], Awaitable[None]]
"""Tells of an answer while it is sampled, and returns when it is whole."""


class Ended(Exception):
    """The episode cannot be scored. `failure` is the class it is counted under."""

    def __init__(self, failure: str, detail: str) -> None:
        super().__init__(detail)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Model:
    """What a session must know of the model. max_length: tokens of a sequence, None: no bound but the engine's.
    template_args: what its chat template gets besides messages and tools."""

    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    max_length: int | None
    tool_format: ToolFormat
    template_args: Mapping[str, Any] = field(default_factory=dict)


class Session:
    """The calls of one episode's agent, many at once if it likes; at most `calls` are answered.

    limit: the bound that a call met first, "" while none did. broken: why the episode cannot go on, whatever its agent
    does; `failed` is set then, and every call is refused.
    """

    def __init__(self, episode: Episode, sampler: Sampler, model: Model, *, calls: int) -> None:
        self.episode = episode
        self.limit = ""
        self.broken: Exception | None = None
        self.failed = asyncio.Event()
        self._sampler, self._model, self._calls = sampler, model, calls
        self._conversations = Conversations(model.tokenizer, arguments=model.template_args)
        self._asked = 0
        self._refused = 0
        self._turns: dict[int, Turn] = {}  # by the order in which they were asked
        self._running: set[asyncio.Task[Completion]] = set()
        self._closed = False

    @property
    def turns(self) -> tuple[Turn, ...]:
        """What was sampled and given to the agent, and an answer that the engine did not finish."""
        return tuple(turn for _, turn in sorted(self._turns.items()))

    def fail(self, error: Exception) -> None:
        """The episode cannot go on; the first reason counts."""
        self.broken = self.broken or error
        self.failed.set()

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The messages of the newest answer's conversation, itself included; () before there is one."""
        return self._conversations.newest

    def text(self, completion: Completion) -> str:
        """What the policy wrote, without the end token."""
        return self._read(self._without_end(completion))

    async def close(self) -> None:
        """No call is answered any more; those that run are aborted."""
        self._closed = True
        await end_all(self._running)

    async def answer(self, chat: Chat, say: Say | None = None) -> Reply:
        """Sample the answer. say: for a streamed one, hears how `Reply.content` begins.

        Raises ApiError. A client that hangs up cancels this, and nothing of its answer is kept: it has not seen it.
        """
        self._check_open()
        try:
            question = self._conversations.question(chat.messages, chat.tools)
        except TaskError as error:  # the template refuses the conversation
            raise ApiError(400, str(error), param="messages") from None
        request = self._request(chat, question)
        turn = self._asked
        self._asked += 1
        blank = Reply(
            id=f"chatcmpl-{self.episode.id}-{turn}",
            created=int(time.time()),
            model=chat.model,
            content="",
            calls=(),
            finish_reason="",
            prompt_tokens=len(request.token_ids),
            sampled_tokens=0,
        )
        growing = None if say is None else self._growing(chat, request)

        async def told(work: asyncio.Future[Completion]) -> None:
            if growing is not None and say is not None:
                await self._told(work, request, blank, growing, say)

        completion = await self._sampled(request, told)
        self._turns[turn] = Turn(request, completion)
        self._check_whole(completion)
        return self._reply(chat, question, turn, blank, growing)

    # --- what a call may have ---------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise _over()
        if self.broken is not None:
            raise self._lost()
        if self._asked >= self._calls:
            raise self._beyond("max_turns", f"the episode has had its {self._calls} calls (collector.max_turns)")

    def _request(self, chat: Chat, question: Question) -> Request:
        """What the engine is asked. Raises ApiError where there is no room for a token."""
        prompt, longest = len(question.rendered.token_ids), self._model.max_length
        room = [self.episode.sampling.max_tokens]
        if chat.most_tokens is not None:
            room.append(chat.most_tokens)
        if longest is not None:
            if prompt >= longest:
                self.limit = self.limit or "context_length"
                raise ApiError(
                    400,
                    f"This model's maximum context length is {longest} tokens. However, your messages resulted in "
                    f"{prompt} tokens, which leaves none for an answer. Please reduce the length of the messages.",
                    code="context_length_exceeded",
                    param="messages",
                )
            room.append(longest - prompt)
        request = self.episode.request(self._asked, question.rendered.token_ids, max_tokens=min(room))
        sampling = request.sampling
        return replace(request, sampling=replace(sampling, stop=tuple(dict.fromkeys((*sampling.stop, *chat.stops)))))

    def _beyond(self, limit: str, said: str) -> ApiError:
        self.limit = self.limit or limit
        self._refused += 1
        if self._refused > MOST_REFUSED:
            self.fail(Ended(FLOOD, f"it went on calling, {MOST_REFUSED} times, when {said}"))
        return ApiError(403, said, code=limit)

    # --- sampling ---------------------------------------------------------------------------------------------------

    async def _sampled(self, request: Request, told: Told) -> Completion:
        work = asyncio.ensure_future(self._sampler.generate(request))
        work.add_done_callback(lambda _: self._running.discard(work))
        self._running.add(work)
        try:
            await told(work)  # raises if the client is gone
            return await self._outcome(work)
        finally:
            if not work.done():
                await end_all([work])

    async def _outcome(self, work: asyncio.Future[Completion]) -> Completion:
        try:
            return await work
        except asyncio.CancelledError:
            if work.cancelled() and self._closed:
                raise _over() from None
            raise
        except ValueError as error:  # no engine can serve it exactly, and that will not change
            raise ApiError(400, str(error), code="request_refused") from None
        except Exception as error:  # of the engines: not the agent's affair
            self.fail(error)
            raise self._lost() from error

    async def _told(
        self, work: asyncio.Future[Completion], request: Request, blank: Reply, growing: GrowingText, say: Say
    ) -> None:
        """Say what is sampled while it is, until it is whole. What the engine cannot tell is said at the end."""
        news = asyncio.Event()
        work.add_done_callback(lambda _: news.set())
        await asyncio.sleep(0)  # so that `generate` has begun: the sampler knows at which engine it is
        self._sampler.listen(request.id, news.set)
        heard = 0
        while not work.done():
            await news.wait()
            news.clear()
            partial = None if work.done() else self._sampler.partial(request.id)
            if partial is not None:
                tokens = self._without_end(partial)
                if text := growing.add(tokens[heard:]):
                    await say(blank, text)
                heard = len(tokens)

    def _check_whole(self, completion: Completion) -> None:
        failure = {"abort": ABORTED, "error": ENGINE_ERROR}.get(completion.finish_reason)
        if failure is not None:
            self.fail(Ended(failure, completion.error or f"the engine ended an answer: {completion.finish_reason}"))
            raise self._lost()

    # --- the answer -------------------------------------------------------------------------------------------------

    def _reply(self, chat: Chat, question: Question, turn: int, blank: Reply, growing: GrowingText | None) -> Reply:
        completion = self._turns[turn].completion
        tokens = self._without_end(completion)
        written = self._read(tokens)
        content, calls = parsed(
            written,
            completion,
            self._model.tool_format if chat.offers_tools else None,
            most=1 if chat.parallel_tool_calls is False else None,
        )
        if growing is not None:  # the client goes on from what it was told
            growing.end(content)
            content = growing.sent
        reply = replace(
            blank,
            content=content,
            calls=tuple((call_id(turn, n), call) for n, call in enumerate(calls)),
            finish_reason="tool_calls" if calls else completion.finish_reason,
            sampled_tokens=len(completion.token_ids),
            logprobs=logprobs_of(completion, len(tokens), self._read) if chat.logprobs else None,
        )
        self._conversations.answer(question, completion.token_ids.tolist(), written=written, given=reply.meaning)
        return reply

    def _growing(self, chat: Chat, request: Request) -> GrowingText | None:
        """None where nothing can be said before the end: what is outside of calls is known only then, and a tokenizer
        that is written in Python cannot decode token by token."""
        backend = getattr(self._model.tokenizer, "backend_tokenizer", None)
        if chat.offers_tools or not isinstance(backend, Tokenizer):
            return None
        return GrowingText(backend, request.sampling.stop)

    def _without_end(self, completion: Completion) -> list[int]:
        tokens: list[int] = completion.token_ids.tolist()
        return tokens[:-1] if tokens and tokens[-1] in self._model.stop_token_ids else tokens

    def _read(self, tokens: list[int]) -> str:
        # Special tokens are shown: an answer that contains them is not the answer without them.
        tokenizer = self._model.tokenizer
        return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _lost(self) -> ApiError:
        return ApiError(500, f"the episode cannot go on: {self.broken}", code="episode_lost")


def _over() -> ApiError:
    return ApiError(401, "the episode of this key has ended", code="episode_ended")
