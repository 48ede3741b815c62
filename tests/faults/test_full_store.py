"""A store that is out of memory or whose disk is full refuses to write: everybody waits, and nothing is lost."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from asyncrl.buffers.archive import Archive
from asyncrl.buffers.audit import audit
from asyncrl.buffers.server import EmbeddedServer
from asyncrl.buffers.store import StoreAway
from asyncrl.learners.lasting import LastingBuffer
from tests.faults.runs import RUN_S, begin, collecting, recipe_of, step, to_the_end

pytestmark = pytest.mark.faults

STEPS = 8
FULL_S = 3.0
"""How long it stays full: several tries of everybody."""


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    """One of its own: other tests' runs would be refused as well."""
    async with EmbeddedServer(tmp_path / "server") as server:
        yield server


async def out_of_memory(server: EmbeddedServer, full: bool) -> None:
    async with Redis.from_url(server.url) as client:
        await client.config_set("maxmemory", 1 if full else 0)


async def disk_full(server: EmbeddedServer, full: bool) -> None:
    """No file may grow: what the server would write gets EFBIG, as ENOSPC on a full disk. Its log as well."""
    _, most = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (1 if full else most, most))


Fill = Callable[[EmbeddedServer, bool], Awaitable[None]]


async def until_refusing(server: EmbeddedServer, expected: bool) -> None:
    """A server notices a full disk, or a free one, within a second."""
    async with asyncio.timeout(RUN_S), Redis.from_url(server.url) as client:
        while True:
            try:
                await client.set("asyncrl:written", "1")
                refused = False
            except ResponseError:
                refused = True
            if refused is expected:
                return
            await asyncio.sleep(0.05)


@pytest.mark.asyncio
@pytest.mark.parametrize("fill", [out_of_memory, disk_full])
async def test_a_store_that_is_full_for_a_while_costs_time_and_nothing_else(
    server: EmbeddedServer, tmp_path: Path, fill: Fill
) -> None:
    archive, forgotten = Archive(tmp_path / "archive"), []
    async with collecting(server.url, recipe_of("full", steps=STEPS)) as buffer, AsyncExitStack() as stack:
        how: dict[str, Any] = {"limit_s": RUN_S, "stop": asyncio.Event(), "recreate": None}
        learner = LastingBuffer(buffer, archive, on_recovered=forgotten.append, **how)
        weights = await begin(learner)
        for _ in range(2):
            weights = await step(learner, archive, weights)
        await fill(server, True)
        stack.push_async_callback(fill, server, False)
        await until_refusing(server, True)
        rest = asyncio.ensure_future(to_the_end(learner, archive, weights))
        await asyncio.wait({rest}, timeout=FULL_S)
        assert not rest.done()
        assert (await buffer.stats()).version == 2, "no step is made while nothing can be written"
        await fill(server, False)
        await rest
        report = await audit(buffer, archive)
    assert report.problems == []
    assert report.stats.version == STEPS
    assert report.stats.lost == {}
    assert forgotten == []


@pytest.mark.asyncio
@pytest.mark.parametrize(("fill", "said"), [(out_of_memory, "maxmemory"), (disk_full, "MISCONF")])
async def test_without_patience_the_first_refusal_is_the_stores_own_words(
    server: EmbeddedServer, tmp_path: Path, fill: Fill, said: str
) -> None:
    archive = Archive(tmp_path / "archive")
    async with collecting(server.url, recipe_of("full", steps=STEPS)) as buffer, AsyncExitStack() as stack:
        weights = await step(buffer, archive, await begin(buffer))
        await fill(server, True)
        stack.push_async_callback(fill, server, False)
        await until_refusing(server, True)
        with pytest.raises(StoreAway, match=rf"store unix://.* failed: .*{said}"):
            await to_the_end(buffer, archive, weights)
        await fill(server, False)
        await until_refusing(server, False)
        await buffer.finish()
