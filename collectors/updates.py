"""New weights on their way into the engines: fetch and stage while they decode, activate in between, prove what is
served.

Weights are ordered by (lineage, version), so those of a new learner are newer though their version may be lower. What
cannot be had or verified changes nothing: the engines go on serving what they serve, and the next try takes whatever is
announced by then. Each phase has its deadline (`weights/base.py`); how far things are is the `Course`'s to say.

| phase    | who ends the wait                              | and if nobody does                                     |
|----------|------------------------------------------------|--------------------------------------------------------|
| announce | an offer over the transport in use             | WeightsLate: the fallback's turn, or what comes next   |
| stage    | the receiver; the engine's copy                | the receiver is abandoned; the engine is started again |
| activate | the engine, between two decode steps           | the engine is started again                            |
| verify   | the engine, when it has hashed what it serves  | the engine is started again                            |
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from asyncrl.buffers.base import Buffer
from asyncrl.buffers.concurrency import all_or_nothing
from asyncrl.buffers.patience import patiently
from asyncrl.collectors.course import Course, offer_of, shown_offers
from asyncrl.collectors.engines.base import Engine, EngineError, KvMode
from asyncrl.collectors.fetching import Fetcher
from asyncrl.collectors.fleet import Fleet, Host
from asyncrl.config.weights import WeightsConfig
from asyncrl.staleness import Lineages, Weights
from asyncrl.weights.base import StagedWeights, WeightsError, WeightsGone
from asyncrl.weights.reach import Place, choose

logger = logging.getLogger(__name__)

NO_TRANSPORT = "none"
"""The transport of weights that are only names, for simulated engines."""


class Updates:
    """Keeps a fleet at the newest announced weights. `run` is one of the collector's long-lived tasks."""

    def __init__(
        self,
        fleet: Fleet,
        buffer: Buffer,
        *,
        config: WeightsConfig,
        me: str,
        place: Place,
        drain_limit_s: float,
        store_limit_s: float,
        on_change: Callable[[], Awaitable[None]],
    ) -> None:
        """`me`: this collector's incarnation. `drain_limit_s`: what running requests get under `weights.update: drain`.
        `on_change` is called when the family tree may have grown and after each activation: it ends dead work and tells
        the store what is served."""
        self.tree = Lineages({})
        self.newest: Weights | None = None
        self.course = Course(
            deadline_s=config.deadline_s, fallback=None if config.fallback is None else config.fallback.transport
        )
        self.began = time.monotonic()
        self.staged_s = 0.0  # in which weights were fetched, checked and staged; total
        self.holding_since: float | None = None  # staged, and `hold` is another's
        self.hold = asyncio.Lock()
        """Who holds it keeps the served weights as they are: an evaluation, for as long as it runs."""
        self._fleet, self._buffer, self._config, self._place = fleet, buffer, config, place
        # Under drain and abort-and-continue nothing runs by then; what a drain could not wait for is computed anew.
        self._kv: KvMode = "keep" if config.update == "keep" else "recompute"
        self._drain_limit_s, self._store_limit_s = drain_limit_s, store_limit_s
        self._on_change = on_change
        self._fetcher = Fetcher(me, device=place.device, deadline_s=config.deadline_s)
        self._news = asyncio.Event()
        self._tried: tuple[Weights, int] | None = None
        self._said = 0  # announcements, by the last beat

    def announced(self, weights: Weights | None, announcements: int) -> None:
        """What a beat said is announced. Wakes `run` if it was not tried yet: a failed try has its own pause."""
        if weights is not None and (weights, announcements) != self._tried:
            self._said = announcements
            self._news.set()

    def engine_restarted(self) -> None:
        """An engine is back, without weights."""
        self._news.set()

    async def prove(self) -> None:
        """Before the first ticket of a membership: engines that serve already, since an earlier one, hash it again. One
        whose weights are not what was published any more, or that cannot tell, is started again."""
        for host in self._fleet.usable:
            engine, expected = host.engine, host.engine.checksum
            try:
                found = await self._hashed(host)
            except WeightsError as error:
                self._fleet.fail(host, engine, str(error))
            else:
                if expected and found != (engine.serving, expected):
                    self._fleet.fail(host, engine, f"serves checksum {found[1]}, {expected} was published")

    async def proof(self) -> list[dict[str, Any]]:
        """What each engine serves by the hash of its live tensors, JSON-able, or why it cannot say."""
        rows = []
        for host in self._fleet.hosts:
            row: dict[str, Any] = {"engine": host.engine.name, "weights": None, "checksum": "", "error": host.failed}
            try:
                if host.usable:
                    weights, row["checksum"] = await self._hashed(host)
                    row["weights"] = list(weights)
            except WeightsError as error:
                row["error"] = str(error)
            rows.append(row)
        return rows

    async def run(self) -> None:
        """Follow the announcements for ever. Raises UnknownMember and BufferError from the store."""
        while True:
            await self._until_look()
            said = self._said  # before the document is read: one that comes after is read again
            found = await patiently(self._buffer.announcement, limit_s=self._store_limit_s)
            if found is not None:
                await self._look(*found, said)

    async def close(self) -> None:
        """Give up what the transports hold on this side, within seconds."""
        await self._fetcher.close()

    def is_dead(self, weights: Weights) -> bool:
        """Whether weights are no ancestor of the newest lineage known: what they sampled can never be trained."""
        return self.newest is not None and not self.tree.is_ancestor(weights, self.newest.lineage)

    async def _until_look(self) -> None:
        """Until there is news, or the course has something to look for without any."""
        try:
            async with asyncio.timeout(self.course.look_in_s(time.monotonic())):
                await self._news.wait()
        except TimeoutError:
            pass
        self._news.clear()
        self.course.looked()

    async def _look(self, weights: Weights, document: Mapping[str, Any], said: int) -> None:
        """One try with what is announced now."""
        self.newest, self._tried = weights, (weights, said)
        self._learn_family(weights, document)
        behind = bool(self._behind(weights))
        if behind:
            self.course.announced(weights, time.monotonic())
            # Work of dead weights ends now: the new ones may take long to come.
            await self._on_change()
        try:
            if document.get("transport") != NO_TRANSPORT:
                self.course.first = choose(_place_of(document), self._place, self._config.transport)
            if not behind:
                self.course.arrived()
                return
            await self._take(weights, document)
        except WeightsGone as error:
            logger.info("%s are gone already (%s): taking the newest", tuple(weights), error)
            self.course.gone(time.monotonic())
        except WeightsError as error:
            self.course.failed(str(error), time.monotonic())
            served = self._fleet.oldest
            logger.error("cannot take %s, still serving %s: %s", tuple(weights), served and tuple(served[0]), error)
        finally:
            self.holding_since = None
        await self._on_change()

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
        """From the document to what is served, as far as it goes."""
        began = time.monotonic()
        staged = await self._fetched(weights, document)
        if staged is None:
            self.course.check(time.monotonic(), shown_offers(document))
            return
        engines = {host: host.engine for host in self._behind(staged.weights)}
        await all_or_nothing(self._stage(host, staged) for host in engines)
        seconds = time.monotonic() - began
        self.staged_s += seconds
        self.course.enter(None, time.monotonic())
        self.holding_since = time.monotonic()
        async with self.hold:
            self.holding_since = None
            try:
                await all_or_nothing(self._make_way(host) for host in _still(engines))
                await all_or_nothing(self._activate(host, staged.weights) for host in _still(engines))
            finally:
                for host in engines:
                    host.entrance.open()
                self._fleet.activated()
        if failed := [host.failed for host in engines if host.failed]:
            self.course.engine_failed("; ".join(failed), time.monotonic())
            return
        self.course.arrived()
        if staged.weights != weights:  # the transport lags: what it lacks is waited for from now on
            self.course.announced(weights, time.monotonic())
        logger.info("serving %s, checksum %s, staged in %.2f s", tuple(staged.weights), staged.checksum, seconds)

    async def _fetched(self, weights: Weights, document: Mapping[str, Any]) -> StagedWeights | None:
        """What the transport in use has, verified; None: nothing that is newer than what is served."""
        if document.get("transport") == NO_TRANSPORT:
            self.course.fetching(weights, time.monotonic())
            return StagedWeights(weights, {}, {}, str(document.get("checksum", "")))
        choice = self.course.choice
        found = None if choice is None else offer_of(document, choice.transport)
        if choice is None or found is None or not self._behind(found[0]) or self.is_dead(found[0]):
            return None
        offered, offer = found
        self.course.fetching(offered, time.monotonic())
        staged = await self._fetcher.fetch(offer)
        published = document.get("checksums", {}).get(f"{offered.lineage}/{offered.version}", "")
        if not staged.checksum and published:
            staged = replace(staged, checksum=published)
        if staged.weights != offered:
            wrong = f"offered as {tuple(offered)}, the transport brought {tuple(staged.weights)}"
        elif not staged.checksum and any(host.engine.serving is None for host in self._behind(offered)):
            # The learner sees in a beat that this collector serves nothing, and has the checksum announced.
            raise WeightsGone(f"{tuple(offered)} were published without a checksum, which the first ones must have")
        elif published and staged.checksum != published:
            wrong = f"{tuple(offered)} came with checksum {staged.checksum}, published was {published}"
        else:
            return staged
        raise WeightsError(f"{choice.transport}: {wrong}")

    async def _stage(self, host: Host, staged: StagedWeights) -> None:
        engine, limit_s = host.engine, self._config.deadline_s
        try:
            async with asyncio.timeout(limit_s):
                await engine.stage(staged)
        except EngineError as error:
            self._fleet.fail(host, engine, str(error))
        except TimeoutError:
            self._fleet.fail(host, engine, f"did not stage {tuple(staged.weights)} within {limit_s:g} s")

    async def _make_way(self, host: Host) -> None:
        """Have no request running in the engine, where `weights.update` says so."""
        entrance, limit_s = host.entrance, self._config.deadline_s
        if self._config.update == "drain":
            entrance.close()
            if not await entrance.emptied(self._drain_limit_s):
                logger.warning(
                    "%d requests of engine %s did not end within %.0f s: they go on under the new weights, their keys "
                    "and values are computed anew", entrance.inside, host.engine.name, self._drain_limit_s,
                )  # fmt: skip
        elif self._config.update == "abort-and-continue":
            entrance.close()
            entrance.interrupt(host.engine)
            if not await entrance.emptied(limit_s):
                why = f"did not end {entrance.inside} requests that were aborted within {limit_s:g} s"
                self._fleet.fail(host, host.engine, why)

    async def _activate(self, host: Host, weights: Weights) -> None:
        engine, limit_s = host.engine, self._config.deadline_s
        loop = asyncio.get_running_loop()
        async with host.exchange:  # a health check may be under way, which has its own limit
            if not _still({host: engine}):
                return
            self.course.enter("activate", time.monotonic())
            try:
                async with asyncio.timeout(limit_s) as limit:

                    def exchanged() -> None:
                        """Verifying has the whole deadline again."""
                        if self.course.phase == "activate" and not limit.expired():
                            self.course.enter("verify", time.monotonic())
                            limit.reschedule(loop.time() + limit_s)

                    await engine.activate(self._kv, exchanged=exchanged)
            except EngineError as error:
                self._fleet.fail(host, engine, str(error))
            except TimeoutError:
                self._fleet.fail(host, engine, f"did not {self.course.phase} {tuple(weights)} within {limit_s:g} s")

    async def _hashed(self, host: Host) -> tuple[Weights, str]:
        """Raises WeightsError if the engine cannot say in time."""
        limit_s = self._config.deadline_s
        try:
            async with asyncio.timeout(limit_s):
                return await host.engine.verify()
        except (EngineError, TimeoutError) as error:
            why = str(error) or f"no answer within weights.deadline_s {limit_s:g}"
            raise WeightsError(f"engine {host.engine.name} cannot say what it serves: {why}") from error


def _still(engines: Mapping[Host, Engine]) -> list[Host]:
    """Those that work with the same engine. One that failed since, or came back without what was staged, gets the
    weights in another round."""
    return [host for host, engine in engines.items() if not host.failed and host.engine is engine]


def _place_of(document: Mapping[str, Any]) -> Place:
    """The learner's. Raises WeightsError for a document without one."""
    try:
        return msgspec.convert(document.get("place"), Place)
    except msgspec.ValidationError as error:
        raise WeightsError(f"the announcement does not say where its learner is: {error}") from error
