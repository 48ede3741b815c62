"""A real server for the buffer's tests, and both implementations behind one fixture."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from asyncrl.buffers.base import Limits
from asyncrl.buffers.memory import MemoryBuffer
from asyncrl.buffers.server import EmbeddedServer
from asyncrl.buffers.store import Store, open_store
from tests.buffer.driver import Clock

_names = (f"run{n}" for n in itertools.count())


@pytest.fixture(scope="session")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedServer(tmp_path_factory.mktemp("store"))
    asyncio.run(server.start())
    yield server.url
    asyncio.run(server.stop())


@pytest_asyncio.fixture
async def store(server_url: str) -> AsyncIterator[Store]:
    store = await open_store(server_url)
    yield store
    await store.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "redis"])
def make_buffer(request: pytest.FixtureRequest, store: Store) -> Any:
    """`await make_buffer(limits, clock=None)`: the same test runs on the reference model and on the real server."""

    async def make(limits: Limits, clock: Clock | None = None) -> Any:
        name = next(_names)
        if request.param == "memory":
            return MemoryBuffer(name, limits, clock=clock) if clock else MemoryBuffer(name, limits)
        buffer = await store.create_run(name, recipe={"run": {"name": name}}, recipe_hash="h", limits=limits)
        buffer.clock = clock
        return buffer

    return make
