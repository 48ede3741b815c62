"""New weights on their way into the engines: stage while they decode, activate in between, say what is served.

Weights are ordered by (lineage, version), so those of a new learner are newer though their version may be lower. What
cannot be had or verified changes nothing: the engines go on serving what they serve, and the next try takes whatever is
announced by then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from asyncrl.buffers.base import Buffer
from asyncrl.buffers.concurrency import all_or_nothing
from asyncrl.buffers.patience import patiently
from asyncrl.collectors.engines.base import EngineError, KvMode
from asyncrl.collectors.fleet import Fleet, Host
from asyncrl.staleness import Lineages, Weights
from asyncrl.weights.base import Receiver, StagedWeights, WeightsError, WeightsGone

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, MOST_PAUSE_S = 0.5, 30.0  # between tries; a newer announcement ends the pause

NO_TRANSPORT = "none"
"""The transport of weights that are only names, for simulated engines."""


class Updates:
    """Keeps a fleet at the newest announced weights. `run` is one of the collector's long-lived tasks."""

    def __init__(
        self,
        fleet: Fleet,
        buffer: Buffer,
        *,
        kv: KvMode,
        deadline_s: float,
        store_limit_s: float,
        on_change: Callable[[], Awaitable[None]],
    ) -> None:
        """`deadline_s`: of one transfer, and of its activation. `on_change` is called when the family tree may have
        grown and after each activation: it ends dead work and tells the store what is served."""
        self.tree = Lineages({})
        self.newest: Weights | None = None
        self.staging: Weights | None = None
        self.error = ""  # of the last try, "" once one succeeded
        # Since when, monotonic: without weights; weights on their way; arrived, `hold` is another's; the try failed.
        self.began = self.staging_since = self.failed_since = time.monotonic()
        self.holding_since: float | None = None
        self.hold = asyncio.Lock()
        """Who holds it keeps the served weights as they are: an evaluation, for as long as it runs."""
        self._fleet, self._buffer = fleet, buffer
        self._kv: KvMode = kv
        self._deadline_s, self._store_limit_s = deadline_s, store_limit_s
        self._on_change = on_change
        self._news = asyncio.Event()
        self._tried: tuple[Weights, int] | None = None
        self._said = 0  # announcements, by the last beat
        self._receivers: dict[str, Receiver] = {}

    def announced(self, weights: Weights | None, announcements: int) -> None:
        """What a beat said is announced. Wakes `run` if it was not tried yet: a failed try has its own pause."""
        if weights is not None and (weights, announcements) != self._tried:
            self._said = announcements
            self._news.set()

    def engine_restarted(self) -> None:
        """An engine is back, without weights."""
        self._news.set()

    async def run(self) -> None:
        """Follow the announcements for ever. Raises UnknownMember and BufferError from the store."""
        pause = FIRST_PAUSE_S
        while True:
            await self._news.wait()
            self._news.clear()
            said = self._said  # before the document is read: one that comes after is read again
            found = await patiently(self._buffer.announcement, limit_s=self._store_limit_s)
            if found is None:
                continue
            weights, document = found
            self.newest, self._tried = weights, (weights, said)
            self._learn_family(weights, document)
            if not self._behind(weights):
                continue
            # Work of dead weights ends now: the new ones may take long to come.
            await self._on_change()
            try:
                self.staging, self.staging_since = weights, time.monotonic()
                await self._take(weights, document)
                self.error, pause = "", FIRST_PAUSE_S
            except WeightsGone as error:
                logger.info("%s are gone already (%s): taking the newest", tuple(weights), error)
            except WeightsError as error:
                self.error, self.failed_since = str(error), time.monotonic()
                logger.error("cannot take %s, still serving %s: %s", tuple(weights), self._fleet.oldest, error)
            finally:
                self.staging = self.holding_since = None
            await self._on_change()
            if self._behind(weights):
                try:
                    async with asyncio.timeout(pause):
                        await self._news.wait()
                except TimeoutError:
                    self._news.set()
                pause = min(2 * pause, MOST_PAUSE_S)

    def close(self) -> None:
        """Give up what the transports hold on this side."""
        for receiver in self._receivers.values():
            receiver.close()

    def is_dead(self, weights: Weights) -> bool:
        """Whether weights are no ancestor of the newest lineage known: what they sampled can never be trained."""
        return self.newest is not None and not self.tree.is_ancestor(weights, self.newest.lineage)

    def _behind(self, weights: Weights) -> list[Host]:
        """Engines that work, or could once they have weights, and do not serve `weights` or newer ones."""
        return [
            host
            for host in self._fleet.hosts
            if not host.failed and (host.engine.serving is None or host.engine.serving < weights)
        ]

    def _learn_family(self, weights: Weights, document: Mapping[str, Any]) -> None:
        """Note where the lineage of an announcement forked. One that was never seen makes its descendants' parents
        unknown, and what they sampled counts as dead: generated again rather than trained by mistake."""
        if fork := document.get("fork"):
            self.tree.forks[weights.lineage] = (int(fork["parent"]), int(fork["version"]))

    async def _take(self, weights: Weights, document: Mapping[str, Any]) -> None:
        began = time.perf_counter()
        staged = await self._receive(weights, document)
        engines = {host: host.engine for host in self._behind(weights)}
        await all_or_nothing(self._stage(host, staged) for host in engines)
        seconds = time.perf_counter() - began
        self.holding_since = time.monotonic()
        async with self.hold:
            self.holding_since = None
            # One that failed since, or came back without what was staged, gets the weights in another round.
            ready = [host for host, engine in engines.items() if not host.failed and host.engine is engine]
            await all_or_nothing(self._activate(host) for host in ready)
        logger.info("serving %s, checksum %s, staged in %.2f s", tuple(weights), staged.checksum, seconds)

    async def _receive(self, weights: Weights, document: Mapping[str, Any]) -> StagedWeights:
        """A verified private copy, made in a thread."""
        if document.get("transport") == NO_TRANSPORT:
            return StagedWeights(weights, {}, {}, str(document.get("checksum", "")))
        offers = document.get("offers") or [{}]
        staged = await asyncio.to_thread(self._stage_from, offers[0])
        if staged.weights != weights:
            raise WeightsError(f"announced as {tuple(weights)}, the transport brought {tuple(staged.weights)}")
        return staged

    def _stage_from(self, offer: Mapping[str, Any]) -> StagedWeights:
        """In a thread, one at a time."""
        transport = str(offer.get("transport"))
        if transport not in self._receivers:
            from asyncrl.weights.build import receiver  # imports torch, of no use to a simulated collector

            self._receivers[transport] = receiver(offer)
        return self._receivers[transport].stage(offer, deadline_s=self._deadline_s)

    async def _stage(self, host: Host, staged: StagedWeights) -> None:
        engine = host.engine
        try:
            async with asyncio.timeout(self._deadline_s):
                await engine.stage(staged)
        except EngineError as error:
            self._fleet.fail(host, engine, str(error))
        except TimeoutError:
            self._fleet.fail(host, engine, f"did not stage {tuple(staged.weights)} within {self._deadline_s:.0f} s")

    async def _activate(self, host: Host) -> None:
        engine = host.engine
        try:
            async with asyncio.timeout(self._deadline_s):
                await engine.activate(self._kv)
        except EngineError as error:
            self._fleet.fail(host, engine, str(error))
        except TimeoutError:
            self._fleet.fail(host, engine, f"did not activate the staged weights within {self._deadline_s:.0f} s")
        else:
            self._fleet.freed.set()
