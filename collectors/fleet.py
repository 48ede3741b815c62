"""The engines of one collector: which can take a group, what they serve, which one failed and is started again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from asyncrl.buffers.concurrency import all_or_nothing
from asyncrl.collectors.engines.base import Completion, Engine, EngineError, Request
from asyncrl.collectors.entrance import Entrance
from asyncrl.collectors.episode import Sampler
from asyncrl.config.derived import derive
from asyncrl.config.recipe import Recipe, SglangEngine, SimulatedEngine, VllmEngine, VllmServerEngine
from asyncrl.config.sizes import size_bytes
from asyncrl.staleness import Weights

logger = logging.getLogger(__name__)

MOST_RESTARTS = 5  # in a row, without one finished request between: then the process ends and says why
FIRST_BACKOFF_S, MOST_BACKOFF_S = 1.0, 30.0


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
    decoding: set[str] = field(default_factory=set)  # ids of requests that need a slot
    entrance: Entrance = field(default_factory=Entrance)
    _mark: tuple[int, int] = (0, 0)
    _moved_at: float = field(default_factory=time.monotonic)

    @property
    def usable(self) -> bool:
        return not self.failed and self.engine.serving is not None

    def startable(self, group_size: int) -> int:
        """Groups whose members would all get a slot now. An idle engine takes a group larger than its slots; none may
        start where running requests are waited for: it would be among them, or wait itself."""
        if self.entrance.closed_since is not None:
            return 0
        free = (self.engine.slots - len(self.decoding)) // group_size
        return max(free, 0 if self.decoding else 1)

    def still_s(self, now: float) -> float:
        """For how long an engine with work has made no token."""
        mark = (self.engine.generated_tokens, sum(map(self.engine.progress, self.decoding)))
        if mark != self._mark or not self.decoding:
            self._mark, self._moved_at = mark, now
        return now - self._moved_at


class Fleet:
    """All of a collector's engines. `broken` is set when one failed, `freed` when one can take more work."""

    def __init__(self, makers: Sequence[Callable[[], MeteredEngine]]) -> None:
        self.hosts = [Host(make, make()) for make in makers]
        self.broken = asyncio.Event()
        self.freed = asyncio.Event()

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
        """How many groups could start now."""
        return sum(host.startable(group_size) for host in self.usable)

    def route(self) -> Host | None:
        """Where a whole group goes: its members share a prompt. None: no engine takes work."""
        return max(self.usable, key=lambda host: host.engine.slots - len(host.decoding), default=None)

    def sampler(self, hosts: Sequence[Host]) -> Sampler:
        """For episodes of no ticket, on these hosts."""
        return _AnyOf(self, hosts)

    def release(self, host: Host, request_ids: Iterable[str]) -> None:
        """These requests need their slots no longer."""
        host.decoding.difference_update(request_ids)
        self.freed.set()

    def fail(self, host: Host, engine: Engine, why: str) -> None:
        """Take an engine out of work; `restart_broken` starts another in its place. Nothing happens if that one is
        there already: what the old one left behind ends late."""
        if host.engine is engine and not host.failed:
            logger.error("engine %s failed: %s", host.engine.name, why)
            host.failed, host.failed_since = why, time.monotonic()
            self.broken.set()

    def fail_still(self, limit_s: float) -> None:
        """Fail the engines that have work and made no token for `limit_s`: who waits for them would wait for ever."""
        now = time.monotonic()
        for host in self.usable:
            if (still := host.still_s(now)) > limit_s:
                self.fail(host, host.engine, f"no token for {still:.0f} s with {len(host.decoding)} requests")

    async def restart_broken(self) -> None:
        """Start failed engines again, each after a growing pause. They serve nothing until weights are activated.
        Raises CollectorError after MOST_RESTARTS of one engine in a row."""
        self.broken.clear()
        for host in self.hosts:
            if host.failed:
                await self._restart(host)

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
            host.engine, host.decoding = host.make(), set()
            try:
                await host.engine.start()
                host.failed = ""
            except EngineError as error:
                host.failed = str(error)


class _AnyOf(Sampler):
    """The least loaded of some engines, request by request."""

    def __init__(self, fleet: Fleet, hosts: Sequence[Host]) -> None:
        self._fleet, self._hosts = fleet, hosts
        self._at: dict[str, Engine] = {}

    async def generate(self, request: Request) -> Completion:
        """See Sampler. An EngineError takes the engine out of work."""
        host = min(self._hosts, key=lambda host: len(host.decoding) / host.engine.slots)
        engine = self._at[request.id] = host.engine
        host.decoding.add(request.id)
        try:
            return await engine.generate(request)
        except EngineError as error:
            self._fleet.fail(host, engine, str(error))
            raise
        finally:
            del self._at[request.id]
            self._fleet.release(host, [request.id])

    def partial(self, request_id: str) -> Completion | None:
        engine = self._at.get(request_id)
        return None if engine is None else engine.partial(request_id)

    def listen(self, request_id: str, heard: Callable[[], None]) -> None:
        if (engine := self._at.get(request_id)) is not None:
            engine.listen(request_id, heard)


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
        )

    return [partial(make, index) for index in range(count)]
