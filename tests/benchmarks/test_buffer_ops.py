"""`bench buffer`: each of its measurements runs, in small, and its control comes out on the other side."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from asyncrl.benchmarks import buffer_ops
from asyncrl.benchmarks.buffer_ops import GONE_BYTES, STAYING_BYTES, _Bench
from asyncrl.benchmarks.frame import Row
from asyncrl.benchmarks.one_collector import group_of
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
    row = await bench._transfer(200, groups=3, turns=4)
    assert (row["groups"], row["bytes"]) == (3, len(encode(group_of(0, 200))))
    assert all(row[f"{name}_ms"] > 0 for name in ("put", "set", "raw_set", "lease", "get", "raw_get"))
    assert row["put_of_set"] == pytest.approx(row["set_ms"] / row["put_ms"])


@pytest.mark.asyncio
async def test_past_tickets_weigh_nothing_unless_their_rows_stay(
    bench: _Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffer_ops, "FILL", 1_000)
    (_, moved), (_, kept) = await bench._with_past(3_000), await bench._with_past(3_000, archive=False)
    assert moved <= GONE_BYTES
    assert kept >= STAYING_BYTES


@pytest.mark.asyncio
async def test_runs_with_few_and_many_tickets_are_compared_round_by_round(
    bench: _Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffer_ops, "ROUNDS", 5)
    runs = {n: await bench._with_live(n) for n in (100, 500)}
    assert [len(run.work) for run in runs.values()] == [100, 500]
    await bench._compare("live", runs)
    assert {(row["kind"], row["tickets"]) for row in bench.rows} == {("live", 100), ("live", 500)}
    (target,) = bench.targets
    ratios = [many / few for few, many in zip(*(_microseconds(row) for row in bench.rows), strict=True)]
    assert target.value == pytest.approx(max(ratios))


def _microseconds(row: Row) -> list[float]:
    return [row[f"{name}_us"] for name in ("beat", "tickets", "put", "lease", "commit")]


@pytest.mark.asyncio
async def test_a_wake_up_is_measured_beside_an_echo(bench: _Bench, tmp_path: Path) -> None:
    await bench.wake_up(tmp_path, turns=20)
    (row,), (target,) = bench.rows, bench.targets
    assert 0 < row["wake_p50_ms"] <= row["wake_p99_ms"]
    assert target.value == pytest.approx(1e-3 * (row["wake_p99_ms"] - row["echo_p99_ms"]))


@pytest.mark.asyncio
async def test_assembly_is_of_groups_that_the_record_accepts(bench: _Bench) -> None:
    decode(encode(group_of(3, 64)))
    bench.assembly(groups=2)
    assert [row["kind"] for row in json.loads(json.dumps(bench.rows))] == ["assembly"] * 2
    assert all(type(target.met) is bool for target in bench.targets), "JSON knows no other"
