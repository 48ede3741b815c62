"""Two real servers for the buffer's tests, and all implementations behind one fixture.

Valkey from the wheel, and the system's Redis: the scripts are the same, the servers are not.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from asyncrl.buffers.limits import Limits
from asyncrl.buffers.memory import MemoryBuffer
from asyncrl.buffers.server import EmbeddedServer
from asyncrl.buffers.store import Store, open_store
from tests.buffer.driver import Clock

_names = (f"run{n}" for n in itertools.count())


@pytest.fixture(scope="session")
def url_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """`url_of("valkey" or "redis")`: where that server listens, started when it is first asked for."""
    started: dict[str, EmbeddedServer] = {}

    def url_of(kind: str) -> str:
        if kind not in started:
            server = EmbeddedServer(tmp_path_factory.mktemp(kind))
            with pytest.MonkeyPatch.context() as patch:
                if kind == "redis":
                    binary = shutil.which("redis-server")
                    if binary is None:
                        pytest.skip("no redis-server on PATH (Debian: apt-get install redis-server)")
                    patch.setattr("asyncrl.buffers.server.find_binary", lambda **_: Path(binary))
                asyncio.run(server.start())
            started[kind] = server
        return started[kind].url

    yield url_of
    for server in started.values():
        asyncio.run(server.stop())


@pytest.fixture(scope="session", params=["valkey", "redis"])
def server_url(request: pytest.FixtureRequest, url_of: Callable[[str], str]) -> str:
    return url_of(request.param)


@pytest_asyncio.fixture
async def store(server_url: str) -> AsyncIterator[Store]:
    store = await open_store(server_url)
    yield store
    await store.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session", params=["memory", "valkey", "redis"])
def buffer_url(request: pytest.FixtureRequest, url_of: Callable[[str], str]) -> str | None:
    """None: the reference model, in this process."""
    return None if request.param == "memory" else url_of(request.param)


@pytest_asyncio.fixture
async def make_buffer(buffer_url: str | None) -> AsyncIterator[Any]:
    """`await make_buffer(limits, clock=None)`: the same test runs on the reference model and on each real server."""
    store = None if buffer_url is None else await open_store(buffer_url)

    async def make(limits: Limits, clock: Clock | None = None) -> Any:
        name = next(_names)
        if store is None:
            return MemoryBuffer(name, limits, clock=clock) if clock else MemoryBuffer(name, limits)
        buffer = await store.create_run(name, recipe={"run": {"name": name}}, recipe_hash="h", limits=limits)
        buffer.clock = clock
        return buffer

    yield make
    if store is not None:
        await store.close()
