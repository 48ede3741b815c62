"""`buffer`: what the buffer's guarantees cost against bare GET and SET, and what stays flat however long a run is.

1. put of a group, and lease of a batch with its groups, against SET and MGET of the same bytes by the same client on
   the same server, turn by turn; and against a bare socket that speaks the protocol itself. The targets are for what
   there is in a run: a put of one group, a lease of eight, the smallest batch of a packaged recipe. A lease is two
   round trips whatever it holds; that of one group is shown beside it.
2. From a put to the learner that waited for it, against a socket that only echoes.
3. From a batch's groups to packed tensors, against a copy of the same bytes; and what it takes to read and check them.
4. Each operation with few and very many tickets behind it, and with few and many live ones, round by round in turns.

Control: rows that never leave for the archive make the store's memory grow with every ticket.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from itertools import permutations
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import uvloop

from asyncrl.benchmarks.echo import EchoServer
from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.benchmarks.one_collector import Run, bytes_of_run, group_of, header_of, timeless
from asyncrl.benchmarks.raw_socket import raw_socket
from asyncrl.buffers.server import EmbeddedServer
from asyncrl.buffers.store import Store, open_store
from asyncrl.schema import decode_all, encode, pack

LENGTHS = (200, 1_000, 8_000, 32_000)  # tokens of a member
GROUPS = 8  # of a batch: the smallest of a packaged recipe
TRANSFER_TARGETS = {8_000: 0.6, 32_000: 0.85}
WARM_UP = 6  # turns that are not counted: they meet cold caches
FLAT = 1.5
ROUNDS = 100
WAKE_S = 0.003
ASSEMBLY = 0.5
FILL = 5_000  # tickets an operation adds while the past is made
SMALL_BYTES = 16_384  # more than a group of eight tokens a member takes
GONE_BYTES, STAYING_BYTES = 2.0, 100.0  # per past ticket: archived, and not


def measure(*, quick: bool, say: Say) -> Measured:
    """Rows: one per group size, one per number of tickets, wake-up, assembly (quick: less of each)."""
    with (
        tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_measure(Path(folder), quick=quick, say=say))


async def _measure(folder: Path, *, quick: bool, say: Say) -> Measured:
    async with EmbeddedServer(folder) as server:
        store = await open_store(server.url)
        try:
            bench = _Bench(store, say)
            await bench.transfers(LENGTHS[:3] if quick else LENGTHS, turns=6 if quick else 36)
            await bench.wake_up(Path(folder), turns=100 if quick else 1_000)
            bench.assembly(groups=16)
            # Last: it takes minutes, and other loads on the machine cost both sides of it the same.
            await bench.flatness(past=20_000 if quick else 1_000_000, live=10_000 if quick else 1_000_000)
            return Measured(rows=bench.rows, targets=bench.targets)
        finally:
            await store.close()


class _Bench:
    def __init__(self, store: Store, say: Say) -> None:
        self.store, self.say = store, say
        self.rows: list[Row] = []
        self.targets: list[Target] = []

    # --- 1 ------------------------------------------------------------------------------------------------------------

    async def transfers(self, lengths: tuple[int, ...], *, turns: int) -> None:
        for length in lengths:
            measured = {groups: await self._transfer(length, groups, turns) for groups in (1, GROUPS)}
            for groups, row in measured.items():
                self.rows.append(row)
                self.say(
                    f"{groups} x {row['bytes'] / 1e3:,.0f} KB: put {row['put_ms']:.2f} ms, {row['put_of_set']:.2f} of "
                    f"SET; lease {row['lease_ms']:.2f} ms, {row['lease_of_get']:.2f} of MGET; "
                    f"{row['put_of_socket']:.2f} and {row['lease_of_socket']:.2f} of a bare socket"
                )
            if target := TRANSFER_TARGETS.get(length):
                put, lease, size = (
                    measured[1]["put_of_set"],
                    measured[GROUPS]["lease_of_get"],
                    measured[1]["bytes"] / 1e6,
                )
                self.targets += [
                    Target(f"put against SET, {size:.1f} MB", put, target, "higher"),
                    Target(f"lease against MGET, {GROUPS} x {size:.1f} MB", lease, target, "higher"),
                ]

    async def _transfer(self, length: int, groups: int, turns: int) -> Row:
        """Batches of so many groups. `put_ms` and its like are of one group, `lease_ms` and its like of a batch."""
        size = len(encode(group_of(0, length)))
        limits = timeless(max_age=0, groups_per_step=groups, max_steps=10 * turns, group_bytes=size + 4096)
        run = await Run.start(self.store, f"transfer-{length}-{groups}", limits)
        client, keys = self.store.client, [f"asyncrl:{{bench}}:{n}" for n in range(groups)]
        times: dict[str, list[float]] = {}
        with raw_socket(self.store.url) as raw:
            for turn in range(turns + WARM_UP):
                await run.serve(turn)
                for n, ticket in enumerate(await run.tickets(groups)):
                    payload = encode(group_of(ticket.ordinal, length))
                    header = header_of(ticket, payload)

                    writes: dict[str, Callable[[], Any]] = {
                        "put": partial(run.put, header, payload),
                        "set": partial(client.set, keys[n], payload),
                        "raw_set": partial(raw.set, n, payload),
                    }
                    await _in_turn(turn * groups + n, writes, times)

                reads: dict[str, Callable[[], Any]] = {
                    "lease": partial(run.lease, turn),
                    "get": partial(client.mget, keys),
                    "raw_get": lambda: [raw.get(n) for n in range(groups)],
                }
                await _in_turn(turn, reads, times)
                await run.buffer.commit(run.lineage, turn)
                await client.delete(*keys, *raw.keys)
                if turn < WARM_UP:
                    times.clear()
        ms = {name: 1e3 * median(values) for name, values in times.items()}
        return {
            "kind": "transfer",
            "groups": groups,
            "bytes": size,
            **{f"{name}_ms": value for name, value in ms.items()},
            "put_of_set": ms["set"] / ms["put"],
            "lease_of_get": ms["get"] / ms["lease"],
            "put_of_socket": ms["raw_set"] / ms["put"],
            "lease_of_socket": ms["raw_get"] / ms["lease"],
        }

    # --- 2 ------------------------------------------------------------------------------------------------------------

    async def wake_up(self, folder: Path, *, turns: int) -> None:
        limits = timeless(max_age=0, groups_per_step=1, max_steps=turns + 1, group_bytes=SMALL_BYTES)
        run = await Run.start(self.store, "wake-up", limits)
        payload = encode(group_of(0, 8))
        learner = await open_store(self.store.url)
        wakes, echoes = [], []
        try:
            buffer = await learner.find_run("wake-up")
            assert buffer is not None
            with EchoServer(folder / "echo") as server:
                reader, writer = await asyncio.open_unix_connection(server.path)
                for turn in range(turns):
                    await run.serve(turn)
                    (ticket,) = await run.tickets(1)
                    waiting = asyncio.create_task(buffer.lease(run.lineage, turn, wait_s=10.0))
                    while (await run.buffer.stats()).waiting is None:  # noqa: ASYNC110 (it waits in the server)
                        await asyncio.sleep(0.001)
                    await run.buffer.put(run.member, header_of(ticket, payload), payload)
                    started = time.perf_counter()
                    await waiting
                    wakes.append(time.perf_counter() - started)
                    await run.buffer.commit(run.lineage, turn)
                    started = time.perf_counter()
                    writer.write(b"x" * 64)
                    await reader.readexactly(64)
                    echoes.append(time.perf_counter() - started)
                writer.close()
        finally:
            await learner.close()
        wake, echo = quantiles(wakes, n=100)[98], quantiles(echoes, n=100)[98]
        self.rows.append(
            {
                "kind": "wake-up",
                "wake_p50_ms": 1e3 * median(wakes),
                "wake_p99_ms": 1e3 * wake,
                "echo_p99_ms": 1e3 * echo,
            }
        )
        self.say(
            f"wake-up p50 {1e3 * median(wakes):.2f} ms, p99 {1e3 * wake:.2f} ms; bare echo p99 {1e3 * echo:.2f} ms"
        )
        self.targets.append(Target("wake-up p99 beyond a bare echo's, s", wake - echo, WAKE_S, "lower"))

    # --- 3 ------------------------------------------------------------------------------------------------------------

    def assembly(self, *, groups: int) -> None:
        for length in (1_000, 8_000):
            payloads = [encode(group_of(n, length)) for n in range(groups)]
            size = sum(map(len, payloads))
            flat = np.frombuffer(b"".join(payloads), np.uint8)
            times: dict[str, list[float]] = {"check": [], "pack": [], "copy": []}
            for _ in range(15):
                moments = [time.perf_counter()]
                batches = decode_all(payloads)
                moments.append(time.perf_counter())
                pack(batches)
                moments.append(time.perf_counter())
                flat.copy()
                moments.append(time.perf_counter())
                for name, took in zip(times, np.diff(moments), strict=True):
                    times[name].append(float(took))
            ms = {name: 1e3 * median(values) for name, values in times.items()}
            share = ms["copy"] / ms["pack"]
            self.rows.append({"kind": "assembly", "bytes": size, **{f"{name}_ms": ms[name] for name in ms}})
            self.say(
                f"assembly of {size / 1e6:.1f} MB: {ms['pack']:.2f} ms, {share:.2f} of a copy of the same bytes; "
                f"reading and checking it before that {ms['check']:.2f} ms"
            )
            self.targets.append(Target(f"assembly against a copy, {size / 1e6:.1f} MB", share, ASSEMBLY, "higher"))

    # --- 4 ------------------------------------------------------------------------------------------------------------

    async def flatness(self, *, past: int, live: int) -> None:
        few, _ = await self._with_past(1_000)
        many, gone = await self._with_past(past)
        _, staying = await self._with_past(20_000, archive=False)
        await self._compare("past", {1_000: few, past: many})
        await self._compare("live", {n: await self._with_live(n) for n in (1_000, live)})
        self.targets += [
            Target(f"store bytes per past ticket, {past:,}", gone, GONE_BYTES, "lower"),
            Target("control: the same while rows never leave", staying, STAYING_BYTES, "higher"),
        ]
        self.say(f"{gone:.2f} bytes of the store per past ticket; {staying:.0f} if its row never left for the archive")

    async def _compare(self, kind: str, runs: dict[int, Run]) -> None:
        """What each operation takes in a run with few tickets and in one with many, round by round in turns."""
        times: dict[int, dict[str, list[float]]] = {tickets: {} for tickets in runs}
        for turn in range(ROUNDS):
            for tickets in runs if turn % 2 else reversed(runs):
                await self._round(runs[tickets], times[tickets])
        us = {t: {name: 1e6 * median(values) for name, values in times[t].items()} for t in runs}
        (few, fast), (many, slow) = us.items()
        growth = {name: slow[name] / fast[name] for name in fast}
        self.rows += [
            {"kind": kind, "tickets": tickets, **{f"{name}_us": us[tickets][name] for name in growth}}
            for tickets in runs
        ]
        told = ", ".join(f"{name} {fast[name]:.0f} to {slow[name]:.0f} us" for name in growth)
        self.say(f"{few:,} to {many:,} {kind} tickets: {told}")
        name = f"slowest growth of an operation, {few:,} to {many:,} {kind} tickets"
        self.targets.append(Target(name, max(growth.values()), FLAT, "lower"))

    async def _with_past(self, past: int, *, archive: bool = True) -> tuple[Run, float]:
        """A run that has `past` trained tickets behind it, and what each of them takes of the store: bytes."""
        limits = timeless(max_age=1, groups_per_step=4, max_steps=10**9, group_bytes=SMALL_BYTES)
        run = await Run.start(self.store, f"past-{past}-{archive}", limits)
        empty = await bytes_of_run(run.buffer)
        for step, first in enumerate(range(0, past, FILL)):
            ordinals = range(first, min(past, first + FILL))
            await run.buffer.recommit(run.lineage, step, [(n, 0) for n in ordinals])
            run.step = step + 1
            await run.buffer.checkpointed(run.lineage, run.step)
            if archive:
                settled = await run.buffer.settled(run.lineage, limit=FILL)
                await run.buffer.archived(run.lineage, [row.ordinal for row in settled])
        grown = await bytes_of_run(run.buffer) - empty
        await run.buffer.join(run.member, {})  # what is committed again ends the work of all collectors
        return run, grown / past

    async def _with_live(self, live: int) -> Run:
        """A run with `live` tickets at work, a window as wide as they need."""
        limits = timeless(
            max_age=live // 4 + 1, groups_per_step=4, max_steps=10**9, group_bytes=SMALL_BYTES, max_bytes=1 << 50
        )
        run = await Run.start(self.store, f"live-{live}", limits)
        while len(run.work) < live:
            run.work += await run.tickets(min(live - len(run.work), 1_000))
        return run

    async def _round(self, run: Run, times: dict[str, list[float]]) -> None:
        """One step of a run, each of its operations timed."""
        payload = encode(group_of(0, 8))

        async def timed(name: str, call: Awaitable[Any]) -> Any:
            started = time.perf_counter()
            result = await call
            times.setdefault(name, []).append(time.perf_counter() - started)
            return result

        await timed("beat", run.serve(run.step))
        run.work += await timed("tickets", run.tickets(4))
        for ticket in [run.work.popleft() for _ in range(4)]:
            await timed("put", run.buffer.put(run.member, header_of(ticket, payload), payload))
        await timed("lease", run.buffer.lease(run.lineage, run.step, wait_s=0.0))
        await timed("commit", run.buffer.commit(run.lineage, run.step))
        run.step += 1


async def _in_turn(turn: int, calls: Mapping[str, Callable[[], Any]], times: dict[str, list[float]]) -> None:
    """Time all calls, one after the other, each turn in another order: who comes first pays for memory that others find
    warm."""
    orders = list(permutations(calls.items()))
    for name, call in orders[turn % len(orders)]:
        started = time.perf_counter()
        result = call()
        if isinstance(result, Awaitable):
            await result
        times.setdefault(name, []).append(time.perf_counter() - started)
