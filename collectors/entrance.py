"""The way into one engine, and what becomes of running requests when it is about to serve other weights.

Under `weights.update: drain` new requests wait here until those inside have ended. Under `abort-and-continue` those
inside are ended with what they have sampled, and come back once the entrance is open, as a request whose prompt is the
old one and that partial answer: their keys and values are computed anew, under the weights that go on. Both work
through `generate` and `abort` alone, so with any engine; `keep` and `recompute` are the engine's own and close nothing.
"""

from __future__ import annotations

import asyncio
import time

from asyncrl.collectors.engines.base import Completion, Engine, Request
from asyncrl.collectors.engines.parts import continued, joined


class Entrance:
    """Of one engine's place: it outlives an engine that is started again."""

    def __init__(self) -> None:
        self.closed_since: float | None = None  # monotonic seconds
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._empty.set()
        self._inside: set[str] = set()
        self._interrupted: set[str] = set()  # ended in mid-answer, to come back
        self._before: dict[str, int] = {}  # tokens that a request sampled before it came back

    @property
    def inside(self) -> int:
        """Requests that the engine has and has not answered."""
        return len(self._inside)

    def progress(self, engine: Engine, request_id: str) -> int:
        """Tokens that a running request has sampled, over all its stretches."""
        return self._before.get(request_id, 0) + engine.progress(request_id)

    async def generate(self, engine: Engine, request: Request) -> Completion:
        """`engine.generate`, once the entrance is open, and again for as long as it was interrupted. The wait ends with
        `open`, which follows every `close`; a group that is ended meanwhile cancels it."""
        parts: list[Completion] = []
        rest = request
        try:
            while True:
                await self._open.wait()
                parts.append(await self._through(engine, rest))
                if parts[-1].finish_reason != "abort" or request.id not in self._interrupted:
                    return joined(parts)
                self._interrupted.discard(request.id)
                rest = continued(rest, parts[-1])
                self._before[request.id] = rest.position
        finally:
            self._interrupted.discard(request.id)
            self._before.pop(request.id, None)

    def close(self) -> None:
        """No request enters until `open`."""
        if self.closed_since is None:
            self.closed_since = time.monotonic()
        self._open.clear()

    def open(self) -> None:
        """Let in whoever waits."""
        self.closed_since = None
        self._open.set()

    def interrupt(self, engine: Engine) -> None:
        """End what is inside with what it has; it comes back when the entrance, which must be closed, is open again."""
        self._interrupted |= self._inside
        engine.abort(sorted(self._inside))

    async def emptied(self, limit_s: float) -> bool:
        """Whether everything inside ended within `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    async def _through(self, engine: Engine, request: Request) -> Completion:
        self._inside.add(request.id)
        self._empty.clear()
        try:
            return await engine.generate(request)
        finally:
            self._inside.discard(request.id)
            if not self._inside:
                self._empty.set()
