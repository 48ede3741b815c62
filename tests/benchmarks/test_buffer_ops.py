"""`bench buffer`: each of its measurements runs, in small, and its control comes out on the other side."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from asyncrl.benchmarks import buffer_ops
from asyncrl.benchmarks.buffer_ops import GONE_BYTES, STAYING_BYTES, _Bench, _group
from asyncrl.buffers.server import EmbeddedServer
from asyncrl.buffers.store import open_store
from asyncrl.schema import decode, encode


@pytest_asyncio.fixture
async def bench(tmp_path: Path) -> AsyncIterator[_Bench]:
    async with EmbeddedServer(tmp_path) as server:
        store = await open_store(server.url)
        yield _Bench(store, lambda line: None)
        await store.close()


@pytest.mark.asyncio
async def test_a_transfer_is_compared_with_the_same_bytes(bench: _Bench) -> None:
    row = await bench._transfer(200, turns=4)
    assert row["bytes"] == len(encode(_group(0, 200)))
    assert all(row[f"{name}_ms"] > 0 for name in ("put", "set", "raw_set", "lease", "get", "raw_get"))
    assert row["put_of_set"] == pytest.approx(row["set_ms"] / row["put_ms"])


@pytest.mark.asyncio
async def test_past_tickets_weigh_nothing_unless_their_rows_stay(
    bench: _Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffer_ops, "FILL", 1_000)
    moved, kept = await bench._with_past(3_000), await bench._with_past(3_000, archive=False)
    assert moved["bytes_per_ticket"] <= GONE_BYTES
    assert kept["bytes_per_ticket"] >= STAYING_BYTES
    assert moved["commit_us"] > 0


@pytest.mark.asyncio
async def test_many_live_tickets_are_worked_through_oldest_first(bench: _Bench) -> None:
    row = await bench._with_live(500)
    assert (row["tickets"], row["lease_us"] > 0) == (500, True)


@pytest.mark.asyncio
async def test_a_wake_up_is_measured_beside_an_echo(bench: _Bench, tmp_path: Path) -> None:
    await bench.wake_up(tmp_path, turns=20)
    (row,), (target,) = bench.rows, bench.targets
    assert 0 < row["wake_p50_ms"] <= row["wake_p99_ms"]
    assert target.value == pytest.approx(1e-3 * (row["wake_p99_ms"] - row["echo_p99_ms"]))


@pytest.mark.asyncio
async def test_assembly_is_of_groups_that_the_record_accepts(bench: _Bench) -> None:
    decode(encode(_group(3, 64)))
    bench.assembly(groups=2)
    assert [row["kind"] for row in json.loads(json.dumps(bench.rows))] == ["assembly"] * 2
    assert all(type(target.met) is bool for target in bench.targets), "JSON knows no other"
