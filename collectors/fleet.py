"""The engines of one collector: what they have to do, what they serve, which one failed and is started again.

A place (`Host`) takes requests while its engine is well and serves weights. One that fails, is late, or does not answer
its health check takes none from then on; whoever waited for it hears of it (`Entrance.give_up`). It is started again,
serves nothing until `updates.py` has brought it what is announced now, and only then takes requests again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Protocol

from asyncrl.buffers.concurrency import all_or_nothing
from asyncrl.collectors.engines.base import Engine, EngineError
from asyncrl.collectors.entrance import Entrance
from asyncrl.collectors.routing import Ask, Load
from asyncrl.config.derived import derive
from asyncrl.config.recipe import Recipe, SglangEngine, SimulatedEngine, VllmEngine, VllmServerEngine
from asyncrl.config.sizes import size_bytes
from asyncrl.staleness import Weights

logger = logging.getLogger(__name__)

MOST_RESTARTS = 5  # in a row, without one finished request between: then the process ends and says why
FIRST_BACKOFF_S, MOST_BACKOFF_S = 1.0, 30.0
CHECK_S = 5.0  # between two health checks of an engine
CHECK_LIMIT_S = 10.0  # for its answer


class CollectorError(RuntimeError):
    """This collector cannot go on; the message says why and what to do."""


class MeteredEngine(Engine, Protocol):
    """What the engines of this package say beside the protocol. Numbers are totals since their start."""

    @property
    def device(self) -> str: ...

    @property
    def generated_tokens(self) -> int: ...

    @property
    def paused_s(self) -> float: ...


@dataclass(slots=True, eq=False)
class Host:
    """An engine's place. The engine in it is exchanged when it failed; the place stays."""

    make: Callable[[], MeteredEngine]
    engine: MeteredEngine
    failed: str = ""  # why it takes no work now
    failed_since: float = 0.0  # monotonic seconds; of the last failure
    restarts: int = 0  # since a request last finished
    decoding: dict[str, Ask] = field(default_factory=dict)  # requests that have a slot, or need one
    entrance: Entrance = field(default_factory=Entrance)
    broken: asyncio.Event = field(default_factory=asyncio.Event)  # set from its failure until it is started again
    exchange: asyncio.Lock = field(default_factory=asyncio.Lock)  # its weights are exchanged, or its health is checked
    _groups: Counter[str] = field(default_factory=Counter)  # of `decoding`
    _promised: int = 0  # tokens of `decoding`, as if none were computed yet
    _mark: tuple[int, int] = (0, 0)
    _moved_at: float = field(default_factory=time.monotonic)

    @property
    def usable(self) -> bool:
        return not self.failed and self.engine.serving is not None

    @property
    def free(self) -> int:
        """Slots that nobody has; below 0 where requests wait for one."""
        return self.engine.slots - len(self.decoding)

    def take(self, request_id: str, ask: Ask) -> None:
        """Have a slot for a request. One whose group is here costs it no prompt. Nothing happens if it has one."""
        if request_id not in self.decoding:
            taken = Ask(ask.group, 0 if self._groups[ask.group] else ask.prompt, ask.most)
            self.decoding[request_id] = taken
            self._groups[ask.group] += 1
            self._promised += taken.prompt + taken.most

    def leave(self, request_id: str) -> None:
        """A request needs its slot no longer. Nothing happens if it has none."""
        if (ask := self.decoding.pop(request_id, None)) is not None:
            self._promised -= ask.prompt + ask.most
            self._groups[ask.group] -= 1
            if not self._groups[ask.group]:
                del self._groups[ask.group]

    def load(self) -> Load:
        """What it has to do now."""
        done = 0
        # An engine takes requests as they come: behind twice as many as it has slots, none has begun.
        for request_id, ask in islice(self.decoding.items(), 2 * self.engine.slots):
            if sampled := self.entrance.progress(self.engine, request_id):
                done += ask.prompt + min(sampled, ask.most)
        return Load(self.free, self._promised - done, set(self._groups))

    def still_s(self, now: float) -> float:
        """For how long an engine with work has made no token."""
        mark = (self.engine.generated_tokens, self.entrance.sampled(self.engine))
        if mark != self._mark or not self.entrance.inside:
            self._mark, self._moved_at = mark, now
        return now - self._moved_at


class Fleet:
    """All of a collector's engines. `freed` is set when one can take more work."""

    def __init__(self, makers: Sequence[Callable[[], MeteredEngine]]) -> None:
        self.hosts = [Host(make, make()) for make in makers]
        self.freed = asyncio.Event()
        self.waiting: dict[
            str, float
        ] = {}  # requests for which no engine serves what they need, since when (monotonic)
        self._activated = asyncio.Event()  # another one each time

    async def start(self) -> None:
        """Start all engines. Raises EngineError if one does not start: at first that is the recipe's fault."""
        await all_or_nothing(host.engine.start() for host in self.hosts)

    async def close(self) -> None:
        for outcome in await asyncio.gather(*(host.engine.close() for host in self.hosts), return_exceptions=True):
            if isinstance(outcome, BaseException):
                logger.warning("an engine did not close cleanly: %s", outcome)

    @property
    def usable(self) -> list[Host]:
        return [host for host in self.hosts if host.usable]

    @property
    def oldest(self) -> tuple[Weights, str] | None:
        """The lowest (lineage, version) over the engines that take work, with its checksum."""
        served = [(h.engine.serving, h.engine.checksum) for h in self.usable if h.engine.serving is not None]
        return min(served, default=None)

    @property
    def device(self) -> str:
        """Where the engines compute, once they are started: the GPU that all of them share, else "cpu"."""
        (device, *others) = {host.engine.device for host in self.hosts}
        return "cpu" if others else device

    @property
    def slots(self) -> int:
        return sum(host.engine.slots for host in self.hosts)

    @property
    def generated_tokens(self) -> int:
        return sum(host.engine.generated_tokens for host in self.hosts)

    def startable(self, group_size: int) -> int:
        """Groups whose members would all get a slot now, wherever. Idle engines take a group larger than their slots;
        none may start where running requests are waited for: it would be among them, or wait itself."""
        hosts = [host for host in self.usable if host.entrance.closed_since is None]
        idle = bool(hosts) and not any(host.decoding for host in hosts)
        return max(sum(max(0, host.free) for host in hosts) // group_size, 1 if idle else 0)

    def release(self, host: Host, request_ids: Iterable[str]) -> None:
        """These requests need their slots no longer."""
        for request_id in request_ids:
            host.leave(request_id)
        self.freed.set()

    def activated(self) -> None:
        """Engines serve other weights, or some again, and let requests in."""
        self.freed.set()
        before, self._activated = self._activated, asyncio.Event()
        before.set()

    async def until_activated(self) -> None:
        """Until `activated` is called the next time."""
        await self._activated.wait()

    def fail(self, host: Host, engine: Engine, why: str) -> None:
        """Take an engine out of work; `tend` starts another in its place. Nothing happens if that one is there already:
        what the old one left behind ends late."""
        if host.engine is engine and not host.failed:
            logger.error("engine %s failed with %d requests: %s", host.engine.name, host.entrance.inside, why)
            host.failed, host.failed_since = why, time.monotonic()
            host.broken.set()
            host.entrance.give_up(why)

    def fail_still(self, limit_s: float) -> None:
        """Fail the engines that have work and made no token for `limit_s`: who waits for them would wait for ever."""
        now = time.monotonic()
        for host in self.usable:
            if (still := host.still_s(now)) > limit_s:
                self.fail(host, host.engine, f"no token for {still:.0f} s with {host.entrance.inside} requests")

    async def watch(self) -> None:
        """Check the health of the engines that take work, for ever."""
        while True:
            await asyncio.sleep(CHECK_S)
            await all_or_nothing(self._check(host) for host in self.usable)

    async def tend(self, *, on_failed: Callable[[], Awaitable[object]], on_started: Callable[[], None]) -> None:
        """Start engines that failed again, for ever: each by itself, after a growing pause. They serve nothing until
        weights are activated. Raises CollectorError after MOST_RESTARTS of one engine in a row."""
        await all_or_nothing(self._tend(host, on_failed, on_started) for host in self.hosts)

    async def _tend(
        self, host: Host, on_failed: Callable[[], Awaitable[object]], on_started: Callable[[], None]
    ) -> None:
        while True:
            await host.broken.wait()
            await on_failed()
            await self._restart(host)
            host.broken.clear()
            on_started()

    async def _check(self, host: Host) -> None:
        if host.exchange.locked():  # it may decode nothing and answer nobody until its weights are exchanged
            return
        engine = host.engine
        async with host.exchange:
            try:
                async with asyncio.timeout(CHECK_LIMIT_S):
                    await engine.check()
            except EngineError as error:
                self.fail(host, engine, str(error))
            except TimeoutError:
                self.fail(host, engine, f"did not answer its health check within {CHECK_LIMIT_S:g} s")

    async def _restart(self, host: Host) -> None:
        while host.failed:
            host.restarts += 1
            if host.restarts > MOST_RESTARTS:
                raise CollectorError(
                    f"engine {host.engine.name} failed {host.restarts} times in a row, last: {host.failed}"
                )
            await asyncio.sleep(min(FIRST_BACKOFF_S * 2 ** (host.restarts - 1), MOST_BACKOFF_S))
            try:
                await host.engine.close()
            except EngineError as error:
                logger.warning("engine %s did not close cleanly: %s", host.engine.name, error)
            host.engine = host.make()
            try:
                await host.engine.start()
                host.failed = ""
            except EngineError as error:
                host.failed = str(error)


def engine_makers(recipe: Recipe, name: str, model_path: Path | None) -> list[Callable[[], MeteredEngine]]:
    """One maker per engine of the recipe. `model_path` is needed by all types but `simulated`."""
    config, count = recipe.collector.engine, recipe.collector.engines

    def make(index: int) -> MeteredEngine:
        if isinstance(config, SimulatedEngine):
            from asyncrl.collectors.engines import simulated

            return simulated.SimulatedEngine(
                f"{name}/{index}",
                slots=config.slots,
                token_s=config.token_s,
                mean_tokens=config.mean_tokens,
                cv=config.cv,
                seed=recipe.run.seed,
            )
        if model_path is None:
            raise CollectorError(f"collector.engine.type {config.type} needs a model, and none was given")
        if isinstance(config, VllmEngine):
            from asyncrl.collectors.engines import vllm

            kv_bytes = config.kv_cache_memory_bytes
            return vllm.VllmEngine(
                f"{name}/{index}",
                model_path,
                slots=derive(recipe).engine_slots,
                max_length=config.max_model_len or recipe.model.max_length,
                dtype=recipe.model.dtype,
                trust_remote_code=recipe.model.trust_remote_code,
                gpu_memory_utilization=config.gpu_memory_utilization,
                kv_cache_memory_bytes=None if kv_bytes is None else size_bytes(kv_bytes),
                enforce_eager=config.enforce_eager,
                extra=config.extra_args,
                place=index,
            )
        if isinstance(config, VllmServerEngine):
            from asyncrl.collectors.engines import vllm_server

            return vllm_server.VllmServerEngine(
                f"{name}/{index}",
                model_path,
                url=config.url,
                api_key_env=config.api_key_env,
                slots=derive(recipe).engine_slots,
                max_length=recipe.model.max_length,
                dtype=recipe.model.dtype,
                trust_remote_code=recipe.model.trust_remote_code,
            )
        if isinstance(config, SglangEngine):
            from asyncrl.collectors.engines import sglang

            return sglang.SglangEngine(
                f"{name}/{index}",
                model_path,
                url=config.url,
                slots=derive(recipe).engine_slots,
                max_length=recipe.model.max_length,
                folder=config.folder,
                api_key_env=config.api_key_env,
                trust_remote_code=recipe.model.trust_remote_code,
            )
        # Here: torch and transformers take seconds to import, and a simulated collector has no use for them.
        from asyncrl.collectors.engines import transformers

        return transformers.TransformersEngine(
            f"{name}/{index}",
            model_path,
            slots=derive(recipe).engine_slots,
            max_length=recipe.model.max_length,
            dtype=recipe.model.dtype,
            attn=recipe.model.attn_implementation,
            trust_remote_code=recipe.model.trust_remote_code,
            adapters=recipe.weights.lora == "adapter",
            place=index,
        )

    return [partial(make, index) for index in range(count)]
