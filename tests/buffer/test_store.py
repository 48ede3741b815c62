"""Stores that would lose work are refused by name; what is in a store is checked when it is read."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.buffers import remote
from asyncrl.buffers.base import PROTOCOL_VERSION, BufferError, Lease
from asyncrl.buffers.server import EmbeddedServer
from asyncrl.buffers.store import RunExists, Store, open_store, payload_key, run_prefix, shown
from asyncrl.schema import SCHEMA_VERSION
from asyncrl.staleness import Weights
from tests.buffer.acts import PAYLOAD, header, joins, limits, puts, starts, takes


@pytest.mark.asyncio
async def test_a_store_nobody_serves_is_named_with_the_fix() -> None:
    with pytest.raises(BufferError, match=r"redis://127\.0\.0\.1:1 is unreachable.*asyncrl buffer serve"):
        await open_store("redis://127.0.0.1:1")


@pytest.mark.asyncio
async def test_a_store_that_may_evict_is_refused(server_url: str, store: Store) -> None:
    await store.client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(BufferError, match=r"may evict keys .*allkeys-lru.*CONFIG SET maxmemory-policy noeviction"):
            await open_store(server_url)
    finally:
        await store.client.config_set("maxmemory-policy", "noeviction")


@pytest.mark.asyncio
@pytest.mark.parametrize("what", ["schema", "protocol"])
async def test_a_run_of_another_version_is_refused(store: Store, what: str) -> None:
    spoken = {"schema": SCHEMA_VERSION, "protocol": PROTOCOL_VERSION}
    document = {**spoken, "name": f"of-{what}", "recipe": {}, "hash": "h"} | {what: 99}
    key = f"{run_prefix(f'of-{what}')}:run"
    await store.client.hset(key, mapping={"document": msgspec.json.encode(document), "limits": "{}"})
    with pytest.raises(BufferError, match=f"has {what} version 99, this asyncrl speaks {spoken[what]}"):
        await store.find_run(f"of-{what}")


@pytest.mark.asyncio
async def test_a_public_address_without_password_or_tls_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(BufferError, match=r"public address \(8\.8\.8\.8\) without password or TLS"):
        await open_store("redis://8.8.8.8:6379")


@pytest.mark.asyncio
async def test_a_url_of_another_kind_is_refused() -> None:
    with pytest.raises(BufferError, match=r"use redis://, rediss:// or unix://"):
        await open_store("http://localhost")


def test_passwords_are_never_shown() -> None:
    assert shown("rediss://me:secret@host:6380/0") == "rediss://me:***@host:6380/0"


@pytest.mark.asyncio
async def test_the_same_recipe_finds_its_run_and_another_is_told_whose_it_is(store: Store) -> None:
    lims = limits(1, 1)
    first = await store.create_run("twice", recipe={"a": 1}, recipe_hash="one", limits=lims)
    again = await store.create_run("twice", recipe={"a": 1}, recipe_hash="one", limits=lims)
    assert (again.run, again.recipe, again.limits) == (first.run, first.recipe, first.limits)
    with pytest.raises(RunExists) as caught:
        await store.create_run("twice", recipe={"a": 2}, recipe_hash="two", limits=lims)
    assert caught.value.recipe == {"a": 1}
    assert "twice" in await store.runs()
    assert await store.find_run("never") is None


async def _one_held(store: Store, name: str) -> tuple[Any, Lease]:
    lims = limits(0, 1)
    buffer = await store.create_run(name, recipe={}, recipe_hash="h", limits=lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    (ticket,) = await takes(buffer, a, 0)
    assert await puts(buffer, a, ticket) == "held"
    lease = await buffer.lease(1, 0, wait_s=0.0)
    assert isinstance(lease, Lease)
    return buffer, lease


@pytest.mark.asyncio
async def test_a_damaged_payload_is_refused_by_ticket(store: Store) -> None:
    buffer, lease = await _one_held(store, "damaged")
    assert await buffer.payloads(lease) == [PAYLOAD]
    await store.client.set(payload_key(run_prefix("damaged"), "0:0"), PAYLOAD[:-1] + b"?")
    with pytest.raises(BufferError, match=r"ticket 0 \(attempt 0\) is damaged"):
        await buffer.payloads(lease)


@pytest.mark.asyncio
async def test_a_missing_payload_is_refused_by_ticket(store: Store) -> None:
    buffer, lease = await _one_held(store, "missing")
    await store.client.delete(payload_key(run_prefix("missing"), "0:0"))
    with pytest.raises(BufferError, match=r"ticket 0 \(attempt 0\) is missing"):
        await buffer.payloads(lease)


@pytest.mark.asyncio
async def test_a_batch_that_takes_several_reads_and_rounds_comes_whole_and_in_order(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    lims = limits(0, 13)  # of 10 bytes at most each: eight reads in three rounds
    monkeypatch.setattr(remote, "READ_BYTES", 20)
    monkeypatch.setattr(remote, "ROUND_BYTES", 50)
    buffer = await store.create_run("rounds", recipe={}, recipe_hash="h", limits=lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    payloads = [f"group {n}".encode() for n in range(13)]
    for ticket, payload in zip(await takes(buffer, a, 0), payloads, strict=True):
        assert await buffer.put(a, header(ticket, payload=payload), payload) == "held"
    lease = await buffer.lease(1, 0, wait_s=0.0)
    assert isinstance(lease, Lease)
    assert await buffer.payloads(lease) == payloads


@pytest.mark.asyncio
async def test_scripts_that_the_server_forgot_are_loaded_again_also_within_a_put(store: Store) -> None:
    lims = limits(1, 1)
    buffer = await store.create_run("forgotten", recipe={}, recipe_hash="h", limits=lims)
    await starts(buffer, lims)
    a = await joins(buffer, "a", Weights(1, 0))
    first, second = await takes(buffer, a, 0)
    await store.client.script_flush()
    assert await buffer.put(a, header(first), PAYLOAD) == "held"
    await store.client.script_flush()
    assert (await buffer.stats()).version == 0
    assert await buffer.put(a, header(second), PAYLOAD) == "held"
    assert [await buffer.payload(ticket.ordinal) for ticket in (first, second)] == [PAYLOAD] * 2


@pytest.mark.asyncio
async def test_a_run_survives_its_server(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    await server.start()
    store = await open_store(server.url)
    buffer, lease = await _one_held(store, "durable")
    _, before = await buffer.snapshot()
    await store.close()
    await server.stop()
    async with EmbeddedServer(tmp_path) as restarted:
        store = await open_store(restarted.url)
        found = await store.find_run("durable")
        assert found is not None
        assert (await found.snapshot())[1] == before
        assert await found.lease(1, 0, wait_s=0.0) == lease
        assert await found.payloads(lease) == [PAYLOAD]
        await store.close()


@pytest.mark.asyncio
async def test_all_keys_of_a_run_lie_in_one_hash_slot(store: Store) -> None:
    await _one_held(store, "slots")
    keys = [key async for key in store.client.scan_iter(match=f"{run_prefix('slots')}*")]
    slots = {_slot(key) for key in keys}
    assert len(keys) > 5
    assert len(slots) == 1


def _slot(key: bytes) -> bytes:
    """What Redis Cluster hashes: the part between the first braces."""
    return key[key.index(b"{") + 1 : key.index(b"}")]


@pytest.mark.asyncio
async def test_a_hundred_collectors_ask_at_once_and_each_ticket_has_one_owner(store: Store) -> None:
    lims = limits(1, 64, max_bytes=1 << 20)
    buffer = await store.create_run("crowd", recipe={}, recipe_hash="h", limits=lims)
    await starts(buffer, lims)
    members = [await joins(buffer, f"c{n}", Weights(1, 0)) for n in range(100)]
    granted = await asyncio.gather(*(buffer.tickets(m, seq=0, want=2, wait_s=0.0) for m in members))
    ordinals = [t.ordinal for tickets in granted for t in tickets]
    assert sorted(ordinals) == list(range(128))
