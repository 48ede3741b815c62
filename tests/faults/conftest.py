"""A real store behind a proxy, and runs in it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from asyncrl.buffers.base import Limits
from asyncrl.buffers.remote import RedisBuffer
from asyncrl.buffers.server import EmbeddedServer
from asyncrl.buffers.store import Store
from tests.buffer.driver import Clock

_names = (f"run{n}" for n in itertools.count())


@pytest.fixture(scope="session")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedServer(tmp_path_factory.mktemp("store"))
    asyncio.run(server.start())
    yield server.url
    asyncio.run(server.stop())


@pytest.fixture
def new_run() -> Any:
    """`await new_run(store, limits)`: a run of its own, on a clock that stands still."""

    async def new_run(store: Store, limits: Limits) -> RedisBuffer:
        buffer = await store.create_run(next(_names), recipe={}, recipe_hash="h", limits=limits)
        buffer.clock = Clock()
        return buffer

    return new_run
