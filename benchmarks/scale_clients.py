"""The other processes of `bench scale`: collectors without engines, many to a process, and rank readers.

`python -m asyncrl.benchmarks.scale_clients collectors|rank URL ARGUMENTS`. Each collector is a client of its own, with
the connections that a collector process has: one or two for what it asks, two to sleep on. What it does is what
`collectors/service.py` does: beats, follows announcements, asks for tickets, puts. Only the generating is a sleep.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from asyncrl.benchmarks.one_collector import header_of
from asyncrl.buffers.base import Beat, Damaged, GroupHeader, Lease, Member, PutResult, Ticket
from asyncrl.buffers.concurrency import all_or_nothing, end_all
from asyncrl.buffers.remote import RedisBuffer
from asyncrl.buffers.store import Store, open_store, payload_key
from asyncrl.staleness import Weights

RUN = "scale"
MODULE = "asyncrl.benchmarks.scale_clients"
READY = b"ready\n"

BEAT_S, ASK_S = 2.0, 10.0  # as collectors/service.py has them
STAGING_S = (0.1, 0.5)  # from hearing of new weights to serving them
COLLECTORS_NICE = 10
"""A thousand collectors have hosts of their own: here they take the cores that store, learner and its ranks leave."""

TOKENS_PER_S = 100  # of a group, for the progress that beats report


@dataclass(frozen=True, slots=True)
class Setting:
    """One run. Groups last log-normally long; the learner's step is a sleep."""

    collectors: int
    processes: int  # that the collectors share
    groups_per_step: int
    max_age: int
    steps: int
    step_s: float
    group_s: float  # mean seconds that a group takes; 0: none at all
    group_bytes: int
    checkpoint_every: int = 4
    ranks: int = 4
    cv: float = 0.3  # of a group's seconds
    archive: bool = True  # False, a control: settled rows stay in the store
    drop: int | None = None  # a control: the payload of this ticket's first attempt is gone once `put` was answered


@dataclass(slots=True)
class Report:
    """What the collectors of a process saw."""

    puts: dict[str, int] = field(default_factory=dict)  # by answer
    held: list[tuple[int, int]] = field(default_factory=list)  # (ordinal, attempt) that the store said it holds
    seconds: dict[str, list[float]] = field(default_factory=dict)  # operation -> each question's
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Fetched:
    """A rank's answer: its share of a batch."""

    seconds: float
    bytes: int
    damaged: tuple[int, ...]  # ordinals


class TimedBuffer(RedisBuffer):
    """Notes how long each question to the store takes; sleeping between two questions is none."""

    seconds: dict[str, list[float]]

    @classmethod
    async def connect(cls, store: Store, seconds: dict[str, list[float]]) -> TimedBuffer:
        found = await store.find_run(RUN)
        assert found is not None, "the run is created before its clients are started"
        buffer = cls(store, RUN, found.limits, recipe=found.recipe)
        buffer.seconds = seconds
        return buffer

    async def _call(self, operation: str, **arguments: Any) -> Any:
        started = time.perf_counter()
        reply = await super()._call(operation, **arguments)
        self.seconds.setdefault(operation, []).append(time.perf_counter() - started)
        return reply

    async def put(self, member: Member, header: GroupHeader, payload: bytes) -> PutResult:
        started = time.perf_counter()
        result = await super().put(member, header, payload)
        self.seconds.setdefault("put", []).append(time.perf_counter() - started)
        return result


class Collector:
    """One simulated collector, with one group in work at most."""

    def __init__(self, buffer: TimedBuffer, number: int, setting: Setting, report: Report) -> None:
        self.buffer, self.setting, self.report = buffer, setting, report
        self.member = Member(f"collector-{number}", f"{number}")
        self.serving: Weights | None = None
        self.work: tuple[Ticket, float] | None = None  # and when it began
        self._random = random.Random(number)
        self._staging: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """Until the run has ended."""
        tasks = [asyncio.ensure_future(loop) for loop in (self._control(), self._tickets())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            await end_all([*tasks, *([self._staging] if self._staging else [])])
            await self.buffer.leave(self.member)

    async def _control(self) -> None:
        while (await self._beat()).phase != "ended":
            await self.buffer.nudge(self.member, BEAT_S)

    async def _beat(self) -> Beat:
        progress = {}
        if self.work is not None:
            ticket, began = self.work
            progress[ticket.ordinal, ticket.attempt] = int(TOKENS_PER_S * (time.monotonic() - began))
        checksum = "" if self.serving is None else f"{self.serving.version:016x}"
        info = {"tokens_per_s": TOKENS_PER_S, "running_groups": len(progress), "waits": [], "host": "bench"}
        beat = await self.buffer.beat(
            self.member, serving=self.serving, checksum=checksum, progress=progress, info=info
        )
        if beat.announced not in (None, self.serving) and (self._staging is None or self._staging.done()):
            self._staging = asyncio.create_task(self._stage(beat.announced))
        return beat

    async def _stage(self, announced: Weights | None) -> None:
        while announced not in (None, self.serving):
            await asyncio.sleep(self._random.uniform(*STAGING_S) if self.setting.step_s else 0.0)
            self.serving = announced
            announced = (await self._beat()).announced

    async def _tickets(self) -> None:
        seq = 0
        while True:
            for ticket in await self.buffer.tickets(self.member, seq=seq, want=1, wait_s=ASK_S):
                seq += 1
                self.work = ticket, time.monotonic()
                await asyncio.sleep(group_seconds(self.setting, ticket))
                await self._put(ticket)
                self.work = None

    async def _put(self, ticket: Ticket) -> None:
        payload = payload_of(ticket, self.setting.group_bytes)
        result = await self.buffer.put(self.member, header_of(ticket, payload, tokens=TOKENS_PER_S), payload)
        self.report.puts[result] = self.report.puts.get(result, 0) + 1
        if result == "held":
            self.report.held.append((ticket.ordinal, ticket.attempt))
        if (ticket.ordinal, ticket.attempt) == (self.setting.drop, 0):
            await self.buffer.store.client.delete(payload_key(self.buffer.prefix, f"{ticket.ordinal}:0"))


def group_seconds(setting: Setting, ticket: Ticket) -> float:
    """How long the group of a ticket takes, whoever makes it."""
    if setting.group_s == 0:
        return 0.0
    variance = math.log(1 + setting.cv**2)
    draw = random.Random(f"{ticket.ordinal}:{ticket.attempt}")
    return draw.lognormvariate(math.log(setting.group_s) - variance / 2, math.sqrt(variance))


def payload_of(ticket: Ticket, size: int) -> bytes:
    """Bytes that are no other group's."""
    return f"{ticket.ordinal}:{ticket.attempt}:".encode().ljust(size, b"x")


async def run_collectors(url: str, setting: Setting, process: int) -> Report:
    """The collectors of one process, from joining to the run's end."""
    report = Report()
    async with AsyncExitStack() as stack:
        collectors = []
        for number in range(process, setting.collectors, setting.processes):
            store = await open_store(url)
            stack.push_async_callback(store.close)
            buffer = await TimedBuffer.connect(store, report.seconds)
            collectors.append(Collector(buffer, number, setting, report))
            await buffer.join(collectors[-1].member, {})
        # Until weights are announced they beat and wait, so that nobody is given up while others still join.
        serving = asyncio.ensure_future(all_or_nothing([collector.serve() for collector in collectors]))
        sys.stdout.buffer.write(READY)
        sys.stdout.flush()
        started = time.process_time()
        try:
            await serving
        finally:
            await end_all([serving])
        report.cpu_s = time.process_time() - started
    return report


def run_rank(url: str) -> None:
    """Fetch every share that comes in, one a line, and say how long it took; until there are no more."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        store = runner.run(open_store(url))
        buffer = runner.run(TimedBuffer.connect(store, {}))
        sys.stdout.buffer.write(READY)
        sys.stdout.flush()
        for line in sys.stdin.buffer:
            fetched = runner.run(fetch(buffer, msgspec.json.decode(line, type=Lease)))
            sys.stdout.buffer.write(msgspec.json.encode(fetched) + b"\n")
            sys.stdout.flush()
        runner.run(store.close())


async def fetch(buffer: RedisBuffer, share: Lease) -> Fetched:
    """A share's groups, or which of them are damaged."""
    started = time.perf_counter()
    try:
        payloads = await buffer.payloads(share)
    except Damaged as error:
        return Fetched(time.perf_counter() - started, 0, tuple(error.groups))
    return Fetched(time.perf_counter() - started, sum(map(len, payloads)), ())


def main(kind: str, url: str, *arguments: str) -> None:
    if kind == "rank":
        run_rank(url)
    else:
        os.nice(COLLECTORS_NICE)
        setting, process, path = arguments
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            decoded = msgspec.json.decode(setting, type=Setting)
            report = runner.run(run_collectors(url, decoded, int(process)))
        Path(path).write_bytes(msgspec.json.encode(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
