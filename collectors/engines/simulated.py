"""An engine without a model: the lengths and times of generation, nothing else. For benchmarks of the pipeline.

How long a request takes is a pure function of (seed, ticket, member), so that a calculation of the same pipeline can be
made on the very same lengths. Token ids are zeros, log-probabilities are -1.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from asyncrl.collectors.engines.base import Completion, Engine, EngineError, FinishReason, KvMode, Request
from asyncrl.collectors.engines.spans import Served, Stretches, token_versions
from asyncrl.staleness import Weights
from asyncrl.weights.base import StagedWeights, WeightsError


def relative_length(seed: int, ticket: int, member: int, cv: float) -> float:
    """Length of one completion over the mean length: log-normal with mean 1 and coefficient of variation `cv`.

    For ln X normal with mean mu and variance s2: mean exp(mu + s2/2), squared coefficient of variation exp(s2) - 1.
    """
    variance = math.log(1 + cv * cv)
    return random.Random(f"{seed}/{ticket}/{member}").lognormvariate(-variance / 2, math.sqrt(variance))


@dataclass(slots=True)
class _Generation:
    """One request. Times are those of the loop's clock, seconds."""

    request: Request
    answer: asyncio.Future[Completion]
    submitted: float
    duration: float
    tokens: int
    stretches: Stretches = field(default_factory=Stretches)
    start: float = math.nan
    timer: asyncio.TimerHandle | None = None

    def sampled(self, now: float) -> int:
        """Tokens finished by `now`."""
        return 0 if self.timer is None else min(self.tokens, math.floor((now - self.start) / self.token_s))

    def begun(self, now: float) -> int:
        """Tokens whose sampling began before `now`: they belong to the weights served then."""
        return min(self.tokens, math.ceil((now - self.start) / self.token_s))

    @property
    def token_s(self) -> float:
        """Seconds per token: the engine's, stretched so that a whole number of tokens takes the exact duration."""
        return self.duration / self.tokens


class SimulatedEngine(Engine):
    """Every running request takes `token_s` seconds per token, however many run; `slots` requests run at once.

    A request lasts mean_tokens * relative_length(seed, ticket, member, cv) * token_s seconds exactly and returns that
    length, rounded, in tokens, at least one. `sampling.max_tokens` is no limit here. Timing does not drift: a request
    that waited for a slot starts when the slot was due to be free, not when the loop noticed.

    The queue is first come, first served by group: the members of a group that were submitted together start together,
    once there are slots for all of them (or all slots are free).
    """

    def __init__(self, name: str, *, slots: int, token_s: float, mean_tokens: float, cv: float, seed: int) -> None:
        if slots < 1:
            raise ValueError(f"an engine needs at least one slot, got {slots}")
        self.name = name
        self.device = "cpu"
        self.generated_tokens = 0
        self.paused_s = 0.0
        self._slots = slots
        self._token_s, self._mean_tokens, self._cv, self._seed = token_s, mean_tokens, cv, seed
        self._active: dict[str, _Generation] = {}
        self._running: dict[str, _Generation] = {}
        self._queue: deque[list[_Generation]] = deque()  # one entry per group
        self._lost: dict[str, Completion] = {}  # what ran when it was closed had sampled so far
        self._staged: Served | None = None
        self._served: Served | None = None
        self._slot_free = -math.inf  # when the slot that was freed last was due to be free
        self._admission: asyncio.Handle | None = None
        self._closed = False
        self._to_unix = 0.0  # from the loop's clock to unix seconds

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def free_slots(self) -> int:
        return max(0, self._slots - len(self._active))

    @property
    def serving(self) -> Weights | None:
        return self._served.weights if self._served else None

    @property
    def checksum(self) -> str:
        return self._served.checksum if self._served else ""

    async def start(self) -> None:
        """Nothing to load. An engine that was closed starts afresh, without weights."""
        self._closed, self._served, self._staged, self._lost = False, None, None, {}
        # Taken once: two clocks read one after the other for each request would add the noise of the scheduler.
        self._to_unix = time.time() - asyncio.get_running_loop().time()

    async def generate(self, request: Request) -> Completion:
        """See Engine. Cancelling it aborts the request."""
        if self._closed:
            raise EngineError(f"engine {self.name} is closed")
        if self._served is None:
            raise EngineError(f"engine {self.name} serves nothing yet: stage and activate weights before generate()")
        if request.id in self._active:
            raise ValueError(f"request {request.id}: a request of this id is running: ids must be unique")
        loop = asyncio.get_running_loop()
        length = self._mean_tokens * relative_length(self._seed, request.ticket, request.member, self._cv)
        tokens = max(1, round(length))
        left = tokens - request.position
        generation = _Generation(
            request, loop.create_future(), loop.time(), length * self._token_s * left / tokens, left
        )
        self._active[request.id] = generation
        if self._queue and self._queue[-1][0].request.group == request.group:
            self._queue[-1].append(generation)
        else:
            self._queue.append([generation])
        if self._admission is None:
            # Not at once: the other members of the group are submitted in this turn of the loop.
            self._admission = loop.call_soon(self._admit)
        try:
            return await generation.answer
        except asyncio.CancelledError:
            self.abort([request.id])
            raise

    def abort(self, request_ids: Sequence[str]) -> None:
        now = asyncio.get_running_loop().time()
        for request_id in request_ids:
            generation = self._active.get(request_id)
            if generation is None:
                continue
            if generation.timer is None:
                group = next(group for group in self._queue if generation in group)
                group.remove(generation)
                if not group:
                    self._queue.remove(group)
            sampled = generation.sampled(now)
            self._finish(generation, sampled, "stop" if sampled == generation.tokens else "abort", now)
        self._admit()

    def progress(self, request_id: str) -> int:
        generation = self._running.get(request_id)
        return generation.sampled(asyncio.get_running_loop().time()) if generation else 0

    def partial(self, request_id: str) -> Completion | None:
        """See Engine. After the engine was closed until it is started again."""
        generation = self._running.get(request_id)
        return self._lost.get(request_id) if generation is None else self._sampled(generation)

    async def stage(self, staged: StagedWeights) -> None:
        self._staged = Served(staged.weights, staged.checksum)

    async def activate(self, kv: KvMode = "keep", *, exchanged: Callable[[], None] | None = None) -> Weights:
        if self._staged is None:
            raise WeightsError("no weights are staged: call stage() before activate()")
        self._served, self._staged = self._staged, None
        now = asyncio.get_running_loop().time()
        for generation in self._running.values():
            generation.stretches.mark(generation.begun(now), self._served)
        return self._served.weights

    async def check(self) -> None:
        """See Engine."""
        if self._closed:
            raise EngineError(f"engine {self.name} is closed")

    async def verify(self) -> tuple[Weights, str]:
        """What was announced of it: there are no tensors."""
        if self._closed or self._served is None:
            raise EngineError(f"engine {self.name} serves nothing")
        return self._served.weights, self._served.checksum

    async def close(self) -> None:
        self._closed = True
        self._lost |= {id: self._sampled(generation) for id, generation in self._running.items()}
        for generation in list(self._active.values()):
            if generation.timer is not None:
                generation.timer.cancel()
            if not generation.answer.done():
                generation.answer.set_exception(EngineError(f"engine {self.name} is closed"))
        self._active.clear()
        self._running.clear()
        self._queue.clear()

    def _admit(self) -> None:
        """Start groups from the head of the queue while there are slots for all their members."""
        self._admission = None
        while self._queue and self._served is not None:
            group, free = self._queue[0], self._slots - len(self._running)
            if free < min(len(group), self._slots):
                return
            start = max(self._slot_free, group[0].submitted)
            for generation in group[:free]:
                self._start(generation, start, self._served)
            del group[:free]
            if not group:
                self._queue.popleft()

    def _start(self, generation: _Generation, start: float, served: Served) -> None:
        generation.start = start
        generation.stretches.mark(0, served)
        end = start + generation.duration
        self._running[generation.request.id] = generation
        generation.timer = asyncio.get_running_loop().call_at(end, self._end, generation, end)

    def _end(self, generation: _Generation, end: float) -> None:
        self._finish(generation, generation.tokens, "stop", end)
        self._admit()

    def _finish(self, generation: _Generation, tokens: int, reason: FinishReason, at: float) -> None:
        request_id = generation.request.id
        del self._active[request_id]
        if generation.timer is not None:
            generation.timer.cancel()
            del self._running[request_id]
            self._slot_free = max(self._slot_free, at)
        self.generated_tokens += tokens
        if not generation.answer.done():
            generation.answer.set_result(self._completion(generation, tokens, reason, at))

    def _sampled(self, generation: _Generation) -> Completion:
        """By a request that runs, until now."""
        now = asyncio.get_running_loop().time()
        tokens = generation.sampled(now)
        return self._completion(generation, tokens, "stop" if tokens == generation.tokens else "abort", now)

    def _completion(self, generation: _Generation, tokens: int, reason: FinishReason, at: float) -> Completion:
        spans = generation.stretches.spans(tokens)
        return Completion(
            token_ids=np.zeros(tokens, dtype=np.int32),
            logprobs=np.full(tokens, -1.0, dtype=np.float32),
            versions=token_versions(spans),
            spans=spans,
            finish_reason=reason,
            first_token=generation.start + generation.token_s + self._to_unix if tokens else 0.0,
            done=at + self._to_unix,
        )
