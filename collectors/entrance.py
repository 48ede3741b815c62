"""The way into one engine, and what becomes of running requests when it is about to serve other weights, or is lost.

Under `weights.update: drain` new requests wait here until those inside have ended. Under `abort-and-continue` those
inside are ended with what they have sampled, and come back once the entrance is open, as a request whose prompt is the
old one and that partial answer: their keys and values are computed anew, under the weights that go on. Both work
through `generate` and `abort` alone, so with any engine; `keep` and `recompute` are the engine's own and close nothing.

An engine that is given up may never answer: whoever waits for it here hears of it at once, with what was sampled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from asyncrl.collectors.engines.base import Completion, Engine, EngineError, Request
from asyncrl.collectors.engines.parts import continued, joined

CANCELLED_S = 1.0
"""How long a request that is cancelled is waited for: engines end one at their next turn."""

T = TypeVar("T")


class EngineLost(EngineError):
    """The engine failed under a request. sampled: what there is of its answer; None: nothing that is known."""

    def __init__(self, why: str, sampled: Completion | None) -> None:
        super().__init__(why)
        self.sampled = sampled


@dataclass(slots=True)
class _Asked:
    """A request from `generate` to its end."""

    gone: asyncio.Future[str]  # why its engine is given up
    heard: Callable[[], None] | None
    parts: list[Completion] = field(default_factory=list)  # that ended so that it may come back

    @property
    def before(self) -> int:
        """Tokens that it sampled before it came back."""
        return sum(len(part.token_ids) for part in self.parts)


class Entrance:
    """Of one engine's place: it outlives an engine that is started again."""

    def __init__(self) -> None:
        self.closed_since: float | None = None  # monotonic seconds
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._empty.set()
        self._inside: set[str] = set()
        self._interrupted: set[str] = set()  # ended in mid-answer, to come back
        self._asked: dict[str, _Asked] = {}

    @property
    def inside(self) -> int:
        """Requests that the engine has and has not answered."""
        return len(self._inside)

    def sampled(self, engine: Engine) -> int:
        """Tokens of what is inside, since it went in."""
        return sum(map(engine.progress, self._inside))

    def progress(self, engine: Engine, request_id: str) -> int:
        """Tokens that a running request has sampled, over all its stretches."""
        asked = self._asked.get(request_id)
        return (asked.before if asked else 0) + engine.progress(request_id)

    def partial(self, engine: Engine, request_id: str) -> Completion | None:
        """As `Engine.partial`, over all stretches of a request that is here."""
        asked = self._asked.get(request_id)
        newest = engine.partial(request_id)
        known = [*(asked.parts if asked else ()), *(() if newest is None else (newest,))]
        return joined(known) if known else None

    def listen(self, engine: Engine, request_id: str, heard: Callable[[], None]) -> None:
        """As `Engine.listen`, also for the stretches to come. Nothing happens for a request that is not here."""
        if (asked := self._asked.get(request_id)) is not None:
            asked.heard = heard
            if request_id in self._inside:
                engine.listen(request_id, heard)

    async def generate(
        self, engine: Engine, request: Request, *, heard: Callable[[], None] | None = None
    ) -> Completion:
        """`engine.generate`, once the entrance is open, and again for as long as it was interrupted. The wait ends with
        `open`, which follows every `close`, or `give_up`; a group that is ended meanwhile cancels it.

        heard: see `Engine.listen`. Raises EngineLost when the engine failed.
        """
        asked = self._asked[request.id] = _Asked(asyncio.get_running_loop().create_future(), heard)
        rest = request
        try:
            while True:
                if not self._open.is_set():
                    await _unless(asked.gone, self._open.wait())
                part = await self._through(engine, rest, asked)
                asked.parts.append(part)
                if part.finish_reason != "abort" or request.id not in self._interrupted:
                    return joined(asked.parts)
                self._interrupted.discard(request.id)
                rest = continued(rest, part)
        except EngineError as error:
            raise EngineLost(str(error), self.partial(engine, request.id)) from error
        finally:
            self._interrupted.discard(request.id)
            del self._asked[request.id]

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

    def give_up(self, why: str) -> None:
        """The engine is lost: whoever waits, for it or for the entrance, waits no longer."""
        for asked in self._asked.values():
            if not asked.gone.done():
                asked.gone.set_result(why)

    async def emptied(self, limit_s: float) -> bool:
        """Whether everything inside ended within `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    async def _through(self, engine: Engine, request: Request, asked: _Asked) -> Completion:
        self._inside.add(request.id)
        self._empty.clear()
        running = asyncio.ensure_future(engine.generate(request))

        def listen() -> None:
            if asked.heard is not None and not running.done():
                engine.listen(request.id, asked.heard)

        asyncio.get_running_loop().call_soon(listen)  # once `generate` has begun: an engine may know it only then
        try:
            return await _unless(asked.gone, running)
        finally:
            self._inside.discard(request.id)
            if not self._inside:
                self._empty.set()


async def _unless(gone: asyncio.Future[str], work: Awaitable[T]) -> T:
    """The outcome of `work`. Raises EngineError as soon as `gone` says why nothing will come of it: what hangs is
    cancelled, and left to itself."""
    running = asyncio.ensure_future(work)
    either: set[asyncio.Future[Any]] = {running, gone}
    running.add_done_callback(_looked_at)
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        running.cancel()
        await asyncio.wait({running}, timeout=CANCELLED_S)
        raise
    if running.done():
        return running.result()
    running.cancel()
    raise EngineError(gone.result())


def _looked_at(done: asyncio.Future[Any]) -> None:
    """What went wrong in what nobody waits for any more is of no interest."""
    if not done.cancelled():
        done.exception()
