"""Requests of an evaluation, so many at a time, and what each episode's took."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable

from asyncrl.collectors.engines.base import Completion, Request
from asyncrl.collectors.episode import Sampler


class Paced(Sampler):
    """A sampler that lets `at_once` requests through; the others wait here, not in an engine's queue. Episodes are not
    held back: while one is scored, or its tools run, another one samples.

    seconds: session -> of its requests, from being let through to their end.
    """

    def __init__(self, sampler: Sampler, *, at_once: int) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._sampler = sampler
        self._through = asyncio.Semaphore(at_once)

    async def generate(self, request: Request) -> Completion:
        """See Sampler."""
        async with self._through:
            began = time.monotonic()
            try:
                return await self._sampler.generate(request)
            finally:
                self.seconds[request.session] += time.monotonic() - began

    def partial(self, request_id: str) -> Completion | None:
        """See Sampler."""
        return self._sampler.partial(request_id)

    def listen(self, request_id: str, heard: Callable[[], None]) -> None:
        """See Sampler."""
        self._sampler.listen(request_id, heard)
