"""One answer, or a part of one, while a server streams it: tokens, behaviour logprobs, between which tokens each was
drawn, and where the answer ends. What a server says of versions, and how, is the matter of its own kind of answer."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from asyncrl.collectors.engines.base import Completion, FinishReason, Request, Span
from asyncrl.collectors.engines.spans import Served, Stretches, token_versions
from asyncrl.collectors.engines.stops import StopStrings
from asyncrl.schema.support import Support


class Answer(ABC):
    """`tokens` grows. `error` is set if it must not go on; `stopped_by` once a stop string is complete: then it is
    whole, whatever the server samples still. `ended` is set when the server has ended it."""

    def __init__(
        self, request: Request, served: Served, stops: StopStrings | None, *, barred: Iterable[int] = ()
    ) -> None:
        """served: what it begins under. stops: looks for the request's stop strings; None: it has none. barred: ids
        that cannot be drawn before the request's `min_tokens`."""
        self.tokens: list[int] = []
        self.error = ""
        self.stopped_by = ""
        self.ended = False
        self.sampled = 0  # by the server, for all that came until now
        self._request, self._stops = request, stops
        self._barred = sorted(~id for id in barred)
        self._logprobs: list[float] = []
        self._kept: list[Sequence[int]] | None = None  # by token, between which ones it was drawn; None: all
        self._stretches = Stretches()
        self._stretches.mark(0, served)
        self._first_token = 0.0

    def changed(self, served: Served) -> None:
        """What comes from here on is sampled from other weights. Called while nothing is sampled, and what was has
        come."""
        self.read()
        self._stretches.mark(len(self.tokens), served)

    def partial(self) -> Completion | None:
        """What was sampled until now; None if it cannot be told."""
        self.read()
        if self.error:
            return None
        return self._completion(self._stretches.spans(len(self.tokens)), "abort")

    @abstractmethod
    def add(self, part: Any) -> int:
        """Take what the server has sent. Returns the number of tokens that came with it."""

    def read(self) -> None:
        """Take in what `add` has put aside, if it does so. `tokens` and `error` are up to date then."""
        return

    @abstractmethod
    def completion(self) -> Completion:
        """The whole, once the server has ended it."""

    def take(
        self, tokens: Sequence[int], logprobs: Sequence[float], kept: Sequence[Sequence[int]] | None = None
    ) -> int:
        """Take what came since the last time: one logprob a token, and between which ones each was drawn, ascending,
        where those were not all (None). Returns the number of tokens."""
        if len(logprobs) != len(tokens) or not all(map(math.isfinite, logprobs)):
            self.error = f"the logprobs of tokens {self.sampled} to {self.sampled + len(tokens)} are {list(logprobs)}"
            return 0
        new = len(tokens)
        if not self.sampled and new:
            self._first_token = time.time()
        self.sampled += new
        if self._stops is not None and (count := self._until_stopped(tokens)) < new:
            tokens, logprobs, kept = tokens[:count], logprobs[:count], kept and kept[:count]
        self.tokens.extend(tokens)
        self._logprobs.extend(logprobs)
        if kept is not None:
            self._kept = self._kept or []
            self._kept.extend(kept)
        return new

    def _until_stopped(self, tokens: Sequence[int]) -> int:
        """How many of them are part of the answer."""
        assert self._stops is not None
        for count, token in enumerate(tokens):
            if self.stopped_by:
                return count
            passed = len(self.tokens) + count < self._request.sampling.min_tokens
            self.stopped_by = self._stops.add(token, passed=passed)
        return len(tokens)

    def _completion(self, spans: tuple[Span, ...], finish_reason: FinishReason) -> Completion:
        """Of what was taken, by spans that cover all of it and more, if the answer ended before the server did."""
        spans = tuple(
            replace(span, end=min(span.end, len(self.tokens))) for span in spans if span.start < len(self.tokens)
        )
        return completion_of(
            self.tokens,
            self._logprobs,
            spans,
            "stop" if self.stopped_by else finish_reason,
            first_token=self._first_token,
            support=self._support(),
            stopped_by=self.stopped_by,
        )

    def _support(self) -> Support | None:
        if self._kept is not None:
            return Support.of(self._kept)
        early = min(self._request.sampling.min_tokens, len(self.tokens))
        if not (self._barred and early):
            return None
        return Support.of([*[self._barred] * early, *[()] * (len(self.tokens) - early)])


def completion_of(
    tokens: list[int],
    logprobs: list[float],
    spans: tuple[Span, ...],
    finish_reason: FinishReason,
    *,
    error: str = "",
    first_token: float = 0.0,
    support: Support | None = None,
    stopped_by: str = "",
) -> Completion:
    """A Completion of plain lists, done now."""
    return Completion(
        token_ids=np.array(tokens, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        versions=token_versions(spans),
        spans=spans,
        finish_reason=finish_reason,
        first_token=first_token,
        done=time.time(),
        error=error,
        support=support,
        stopped_by=stopped_by,
    )


def failed(error: str) -> Completion:
    """An answer that went wrong: what was sampled before has no versions that one could rely on."""
    return completion_of([], [], (), "error", error=error)


def nothing() -> Completion:
    """An answer that was ended before its first token."""
    return completion_of([], [], (), "abort")
