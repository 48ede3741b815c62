"""The learner's buffer, which lasts: a store that is away is waited for, one that came back forgetful is told again.

Every operation of a buffer may be repeated, so that one rule serves for all of them: as long as the store does not
answer, ask again; when it answers that it does not know what it had acknowledged, `recover` it, and ask again. Only two
calls need more: a commit, since the weights contain its batch by then and there is no lease left to commit, and the
groups of a lease that is gone, for which there is another lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from asyncrl.buffers.archive import Archive
from asyncrl.buffers.base import Buffer, BufferError, Commit, Fenced, Lease
from asyncrl.buffers.patience import patiently
from asyncrl.buffers.store import NoRun, StoreAway
from asyncrl.learners.recovery import Forks, Recovered, is_behind, recover, tickets_of
from asyncrl.staleness import Weights

log = logging.getLogger(__name__)

T = TypeVar("T")

MOST_HEALINGS = 3
"""For the sake of one call. A store that forgets more often than that will do it again."""

Position = Callable[[], tuple[Forks, Weights]]
"""The lineages on the path to the learner's weights, and those weights: what it has trained and been acknowledged."""


class LeaseGone(BufferError):
    """The store has forgotten a lease whose groups are not all there any more; leasing again gives another batch."""


class LastingBuffer:
    """A `base.Buffer` made of another one. `limit_s`: longest outage that is borne; `stop`: when set, a short one.

    `recreate` creates the run where the store no longer knows it; None where that cannot happen (`memory://`).
    `on_recovered` is told what a store had forgotten.
    """

    def __init__(
        self,
        buffer: Buffer,
        archive: Archive,
        *,
        limit_s: float,
        stop: asyncio.Event,
        recreate: Callable[[], Awaitable[object]] | None,
        on_recovered: Callable[[Recovered], None],
    ) -> None:
        self._buffer = buffer
        self._archive = archive
        self._limit_s = limit_s
        self._stop = stop
        self._recreate = recreate
        self._on_recovered = on_recovered
        self._position: Position | None = None
        self._healing = asyncio.Lock()
        self._healed = 0
        self._announced: tuple[Weights, Mapping[str, Any]] | None = None
        self._evaluation: Mapping[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        """An attribute of the buffer; if it is an operation, one that lasts."""
        found = getattr(self._buffer, name)
        if not asyncio.iscoroutinefunction(found):
            return found

        async def lasting(*arguments: Any, **options: Any) -> Any:
            return await self._last(lambda: found(*arguments, **options))

        return lasting

    def trains(self, position: Position) -> None:
        """From now on a store that is behind `position()` has forgotten something."""
        self._position = position

    async def commit(self, lineage: int, step: int, *, skipped: bool = False) -> Commit:
        try:
            return await self._bear(lambda: self._buffer.commit(lineage, step, skipped=skipped))
        except StoreAway:
            raise
        except BufferError as error:
            if not await self._heal() and isinstance(error, Fenced):
                raise
            # What the store refuses is a lease that it has forgotten. The weights have learned from that batch.
            tickets = await tickets_of(self._archive, Weights(lineage, step))
            return await self._bear(lambda: self._buffer.recommit(lineage, step, tickets))

    async def payloads(self, lease: Lease) -> list[bytes]:
        """Raises LeaseGone where the store has forgotten the lease; BufferError for the same lease's damaged groups."""
        try:
            return await self._bear(lambda: self._buffer.payloads(lease))
        except StoreAway:
            raise
        except BufferError as error:
            await self._heal()
            if await self._last(lambda: self._buffer.lease(lease.lineage, lease.step, wait_s=0.0)) == lease:
                raise
            raise LeaseGone(f"the store has forgotten the lease of step {lease.step}: lease again") from error

    async def announce(self, weights: Weights, document: Mapping[str, Any]) -> None:
        self._announced = (weights, document)
        await self._last(lambda: self._buffer.announce(weights, document))

    async def request_evaluation(self, request: Mapping[str, Any]) -> None:
        self._evaluation = request
        await self._last(lambda: self._buffer.request_evaluation(request))

    async def evaluation(self, request_id: str, *, wait_s: float) -> Mapping[str, Any] | None:
        result = await self._last(lambda: self._buffer.evaluation(request_id, wait_s=wait_s))
        if result is not None:
            self._evaluation = None
        return result

    async def _last(self, call: Callable[[], Awaitable[T]]) -> T:
        for _ in range(MOST_HEALINGS):
            healed = self._healed
            try:
                return await self._bear(call)
            except StoreAway:
                raise
            except BufferError:
                if healed == self._healed and not await self._heal():  # else it was healed by another call
                    raise
        return await self._bear(call)

    async def _bear(self, call: Callable[[], Awaitable[T]]) -> T:
        return await patiently(call, limit_s=self._limit_s, bears=StoreAway, hurry=self._stop)

    async def _heal(self) -> bool:
        """Whether the store, which has refused something, had forgotten something and now knows it again."""
        if self._position is None:
            return False
        healed = self._healed
        async with self._healing:
            if healed != self._healed:  # by another call, meanwhile
                return True
            try:
                stats = await self._bear(self._buffer.stats)
            except NoRun as gone:
                if self._recreate is None:
                    raise
                log.warning("%s; creating it again", gone)
                await self._bear(self._recreate)
                stats = await self._bear(self._buffer.stats)
            forks, own = self._position()
            if not is_behind(Weights(stats.lineage, stats.version), own):
                return False
            if found := await self._bear(lambda: recover(self._buffer, self._archive, forks=forks, own=own)):
                self._on_recovered(found)
            await self._bear(self._remind)
            self._healed += 1
            return True

    async def _remind(self) -> None:
        """What else collectors are to find there."""
        if self._announced is not None:
            await self._buffer.announce(*self._announced)
        if self._evaluation is not None:
            await self._buffer.request_evaluation(self._evaluation)
