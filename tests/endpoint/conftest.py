"""An endpoint whose policy is a function of the tokens that it is asked with, and the clients that call it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import openai
import pytest
from transformers import PreTrainedTokenizerFast

from asyncrl.collectors.endpoint.server import Endpoint
from asyncrl.collectors.endpoint.session import Model, Session
from asyncrl.collectors.engines.base import Completion, FinishReason, Request, Sampling, Span
from asyncrl.collectors.engines.stops import first_ended
from asyncrl.collectors.episode import Episode, Sampler
from asyncrl.collectors.rollout import Prompt
from asyncrl.learners.tiny_tokenizer import build_tokenizer
from asyncrl.staleness import Weights
from asyncrl.tasks.base import Row

TOKENIZER = build_tokenizer(512)
END = TOKENIZER.eos_token_id
LIMIT_S = 20.0
LOGPROB = -0.25


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def last_words(request: Request) -> str:
    """The text of the newest message of a user's or tool's."""
    text = TOKENIZER.decode(list(request.token_ids), skip_special_tokens=False)
    return text.split("<|end|>")[-2].split("|>")[-1]


@dataclass
class Policy(Sampler):
    """Answers as `write` says, which may raise; token by token where somebody listens. `gate`: what every answer waits
    for, if anything. finish: how all of them end; None: by their end token, a stop string or `max_tokens`."""

    write: Callable[[Request], str | Sequence[int]] = lambda request: last_words(request)[::-1]
    finish: FinishReason | None = None
    gate: asyncio.Event | None = None
    tokenizer: PreTrainedTokenizerFast = TOKENIZER
    requests: list[Request] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    _partial: dict[str, list[int]] = field(default_factory=dict)
    _heard: dict[str, Callable[[], None]] = field(default_factory=dict)

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        self.asked.set()
        try:
            if self.gate is not None:
                await self.gate.wait()
            written = self.write(request)
            end = self.tokenizer.eos_token_id
            tokens = [*ids(written), END] if isinstance(written, str) else list(written)
            stopped_by, reason = "", self.finish
            for n in range(len(tokens)):
                text = self.tokenizer.decode(tokens[: n + 1], skip_special_tokens=False)
                stopped_by = first_ended(request.sampling.stop, text, 0)
                if stopped_by or n + 1 == request.sampling.max_tokens or tokens[n] == end:
                    reason = reason or ("stop" if stopped_by or tokens[n] == end else "length")
                    tokens = tokens[: n + 1]
                    break
                if request.id in self._heard:
                    self._partial[request.id] = tokens[: n + 1]
                    self._heard[request.id]()
                await asyncio.sleep(0)
            return completion(tokens, reason or "stop", stopped_by=stopped_by)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def partial(self, request_id: str) -> Completion | None:
        tokens = self._partial.get(request_id)
        return None if tokens is None else completion(tokens, "abort")

    def listen(self, request_id: str, heard: Callable[[], None]) -> None:
        self._heard[request_id] = heard


def completion(tokens: Sequence[int], reason: FinishReason, *, stopped_by: str = "") -> Completion:
    count = len(tokens)
    return Completion(
        token_ids=np.array(tokens, np.int32),
        logprobs=np.full(count, LOGPROB, np.float32),
        versions=np.full(count, 3, np.int32),
        spans=(Span(Weights(1, 3), 0, count, "03"),) if count else (),
        finish_reason=reason,
        first_token=1.0,
        done=2.0,
        stopped_by=stopped_by,
    )


def episode(number: int = 0, *, max_tokens: int = 256) -> Episode:
    prompt = Prompt(Row(f"row-{number}", "x", "y"), (1,), "agent")
    return Episode(prompt, f"{number}.1", "run/0", number, 1, 0, Sampling(max_tokens=max_tokens))


@dataclass
class Seat:
    """An episode at the endpoint."""

    endpoint: Endpoint
    session: Session
    key: str
    client: openai.AsyncOpenAI

    @property
    def sync_client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.endpoint.base_url, api_key=self.key, timeout=LIMIT_S)


@dataclass
class House:
    endpoint: Endpoint
    client: openai.AsyncOpenAI
    numbers: itertools.count = field(default_factory=itertools.count)

    def seat(
        self,
        policy: Policy | None = None,
        *,
        calls: int = 20,
        max_tokens: int = 256,
        max_length: int | None = 512,
    ) -> Seat:
        model = Model(TOKENIZER, (END,), max_length, "hermes")
        session = Session(episode(next(self.numbers), max_tokens=max_tokens), policy or Policy(), model, calls=calls)
        key = self.endpoint.open(session)
        return Seat(self.endpoint, session, key, self.client.with_options(api_key=key))


@asynccontextmanager
async def listening() -> AsyncIterator[House]:
    endpoint = Endpoint()
    await endpoint.start()
    try:
        async with (
            asyncio.timeout(LIMIT_S),
            openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="none", timeout=LIMIT_S) as client,
        ):
            yield House(endpoint, client)
    finally:
        await endpoint.close()


class Kit:
    policy = Policy
    listening = staticmethod(listening)
    tokenizer, end, ids, logprob = TOKENIZER, END, staticmethod(ids), LOGPROB
    limit_s = LIMIT_S


@pytest.fixture
def kit() -> type[Kit]:
    return Kit
