"""What a run stands on, looked at before or while it runs: packages, this machine, and the store."""

from __future__ import annotations

import asyncio
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from asyncrl.buffers.base import BufferError
from asyncrl.buffers.server import EmbeddedServer
from asyncrl.buffers.store import CONNECT_S, open_store, refuse_public, shown
from asyncrl.config.recipe import Buffer as BufferKeys
from asyncrl.config.sizes import size_bytes
from asyncrl.runtime import diagnosis
from asyncrl.runtime.diagnosis import Finding, error, ok, warning
from asyncrl.runtime.place import place_of, store_url

PACKAGES = ("asyncrl", "torch", "transformers", "pyarrow", "redis", "msgspec")
SHARED_MEMORY = Path("/dev/shm")
ENOUGH_SHARED = 1 << 30
"""Weights of about 150 million parameters, three copies of which may lie there, in bfloat16."""

ENOUGH_FILES = 1024
PINGS = 20


@dataclass(frozen=True, slots=True)
class Store:
    """What a store said. config: None where CONFIG is not allowed. ahead_s: its clock minus ours."""

    info: Mapping[str, Any]
    config: Mapping[str, str] | None
    round_trip_ms: float
    ahead_s: float


async def examine(url: str | None, run: str | None) -> list[Finding]:
    """Everything, in the order in which a person would ask. `url`: the store; None: that of the run's folder, or
    without a `run` an embedded one, started for this. `run`: its recipe says how much the store must hold.

    Raises RunFolderError."""
    findings = [packages(), files(), shared_memory(), await asyncio.to_thread(devices)]
    try:
        async with _served(url, run) as (where, name):
            findings += await store(where, name)
    except BufferError as wrong:
        findings.append(error("store", str(wrong)))
    return findings


@asynccontextmanager
async def _served(url: str | None, run: str | None) -> AsyncIterator[tuple[str, str | None]]:
    """The URL, and the run's name in that store."""
    if url is not None:
        yield url, run
    elif run is not None:
        place = place_of(run, None)
        async with store_url(place) as where:
            yield where, place.name
    else:
        with tempfile.TemporaryDirectory(prefix="asyncrl-doctor-") as folder:
            async with EmbeddedServer(Path(folder)) as server:
                yield server.url, None


async def store(url: str, run: str | None) -> list[Finding]:
    """Of the store at `url`. Raises BufferError if it cannot be asked at all."""
    refuse_public(url)
    said = await ask(url)
    max_bytes, of_run = await _run(url, run)
    findings = [
        ok("store", f"{shown(url)} answers"),
        diagnosis.server(said.info),
        diagnosis.eviction(said.info),
        diagnosis.memory(said.info, max_bytes),
        diagnosis.loss_window(said.info, said.config),
        diagnosis.failover(said.info),
        diagnosis.round_trip(said.round_trip_ms),
        diagnosis.clock(said.ahead_s),
        of_run,
    ]
    return [finding for finding in findings if finding is not None]


async def ask(url: str) -> Store:
    """INFO, CONFIG and the clock. Raises BufferError."""
    client = Redis.from_url(
        url,
        socket_timeout=CONNECT_S,
        socket_connect_timeout=CONNECT_S,
        retry=Retry(NoBackoff(), 0),
        decode_responses=True,
    )
    try:
        async with asyncio.timeout(4 * CONNECT_S):
            times = []
            for _ in range(PINGS):
                began = time.perf_counter()
                await client.ping()
                times.append(time.perf_counter() - began)
            before = time.time()
            seconds, microseconds = await client.time()
            ahead_s = seconds + microseconds / 1e6 - (before + time.time()) / 2
            return Store(
                info=await _allowed(client, "info") or {},
                config=await _allowed(client, "config_get", *diagnosis.SETTINGS),
                round_trip_ms=1000 * statistics.median(times),
                ahead_s=ahead_s,
            )
    except (RedisError, OSError, TimeoutError) as wrong:
        raise BufferError(
            f"{shown(url)} cannot be asked ({str(wrong) or type(wrong).__name__}); start it with "
            "`asyncrl buffer serve`, or correct the URL, its user and password"
        ) from None
    finally:
        await client.aclose()


async def _allowed(client: Redis, command: str, *arguments: str) -> Mapping[str, Any] | None:
    """The answer; None where this user may not ask, or the provider has taken the command away."""
    try:
        return cast(Mapping[str, Any], await getattr(client, command)(*arguments))
    except RedisConnectionError:
        raise
    except RedisError:
        return None


async def _run(url: str, run: str | None) -> tuple[int, Finding | None]:
    """`buffer.max_bytes` of the run, the default without one, and what is known of it."""
    default = size_bytes(BufferKeys().max_bytes)
    if run is None:
        return default, None
    try:
        opened = await open_store(url)
        try:
            buffer = await opened.find_run(run)
            if buffer is None:
                others = ", ".join(await opened.runs()) or "none"
                return default, error("run", f"{run!r} is not in this store; it has: {others}")
            stats = await buffer.stats()
        finally:
            await opened.close()
    except BufferError as wrong:
        return default, error("run", str(wrong))
    alive = sum(member.alive for member in stats.members)
    says = f"{run}: {stats.phase}, lineage {stats.lineage}, version {stats.version}, {alive} collectors"
    return buffer.limits.max_bytes, ok("run", says)


def packages() -> Finding:
    """What is installed, without loading it."""
    versions = [f"Python {sys.version.split()[0]}"]
    missing = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return error("packages", f"{', '.join(missing)} not installed", "pip install asyncrl")
    return ok("packages", ", ".join(versions))


def files() -> Finding:
    """How many files a process may open: a connection is one, and a store has one for each collector and rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    says = f"{soft} a process"
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH_FILES:
        return ok("open files", says)
    return warning("open files", says, f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}")


def shared_memory() -> Finding:
    """Where weights travel from the learner to the collectors of its host."""
    if not SHARED_MEMORY.is_dir():
        return ok("shared memory", "not a file system here; limited by memory")
    free = shutil.disk_usage(SHARED_MEMORY).free
    says = f"{free / 2**30:.1f} GiB free in {SHARED_MEMORY}"
    if free >= ENOUGH_SHARED:
        return ok("shared memory", says)
    return warning(
        "shared memory",
        says,
        "up to three copies of the weights lie there: in a container give --shm-size, elsewhere remount it larger",
    )


def devices() -> Finding:
    """What torch can compute on. Loads torch."""
    import torch

    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}, which finds no device" if torch.version.cuda else "built for CPU"
        return ok("devices", f"CPU (torch is {built})")
    names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return ok("devices", f"CUDA {torch.version.cuda}: {', '.join(names)}")
