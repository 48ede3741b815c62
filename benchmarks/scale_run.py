"""One run of `bench scale`: a store, processes of simulated collectors, rank readers, a learner that trains nothing.

The learner does everything else that a learner does: leases, has its ranks fetch their shares, commits, looks at the
sums, announces, checkpoints every few steps and moves settled rows into an archive's ledger. Then the account: what the
store said to collectors it holds must have been trained, or still be there.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from asyncrl.benchmarks.one_collector import bytes_of_run
from asyncrl.benchmarks.scale_clients import MODULE, READY, RUN, Fetched, Report, Setting, TimedBuffer
from asyncrl.buffers.archive_ledger import ArchiveLedger
from asyncrl.buffers.audit import ledger_problems, moved_problems
from asyncrl.buffers.base import BufferError, Lease, State, TicketRow, Waiting
from asyncrl.buffers.limits import Limits
from asyncrl.buffers.server import EmbeddedServer
from asyncrl.buffers.store import open_store
from asyncrl.learners.ledger import move_settled
from asyncrl.staleness import Weights

CONNECTIONS = 5
"""Of a collector, at most: two to sleep on, and what it asks at the same time (a beat, tickets or a put) twice over."""

OTHER_FILES = 200  # of any process here
TICKETS = "tickets in work"
SLICE_S = 0.05  # a wait for a batch is attributed in pieces of this length
START_LIMIT_S, STEP_LIMIT_S, END_LIMIT_S = 180.0, 60.0, 60.0


@dataclass(slots=True)
class Observed:
    """What was seen of a run. Steady: from when the window has been full once, to the last commit."""

    trained: int = 0  # tickets, steady
    wall_s: float = 0.0  # steady
    store_cpu_s: float = 0.0  # of the server's main thread, which runs the scripts, steady
    clients_cpu_s: float = 0.0  # of all collectors' processes, from the last one's joining on
    clients_s: float = 0.0  # how long that was
    connections: int = 0
    peak_bytes: int = 0  # of the run's keys, with all rows that had to be there
    server_bytes: int = 0  # of the server with connections and scripts, highest so far
    connection_bytes: int = 0  # of that, the connections
    seconds: dict[str, list[float]] = field(default_factory=dict)  # operation -> each question's
    waited: dict[str, float] = field(default_factory=dict)  # by the learner, for what: seconds, steady
    waited_for: dict[str, float] = field(default_factory=dict)  # of that, for whom: collectors share it equally
    puts: Counter[str] = field(default_factory=Counter)  # by answer
    lost: int = 0  # groups that the store said it holds, neither trained nor there
    twice: int = 0  # tickets that were trained more than once
    problems: list[str] = field(default_factory=list)  # found by the audit


def limits_of(setting: Setting) -> Limits:
    """`max_bytes` is the least that is allowed: a bound with room in it would hide what grows."""
    return Limits(
        max_age=setting.max_age,
        groups_per_step=setting.groups_per_step,
        max_steps=setting.steps + setting.max_age + 1,  # the last steps have tickets behind them like all others
        group_bytes=setting.group_bytes,
        max_bytes=(setting.max_age + 1) * setting.groups_per_step * setting.group_bytes,
    )


def allow_files(collectors: int) -> str:
    """Raise the limit of open files of this process and its children as far as needed; says what needs how many.
    Raises BufferError where the system does not allow that."""
    need = CONNECTIONS * collectors + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < need:
        raise BufferError(
            f"{collectors:,} collectors may need {need:,} connections, this system allows {hard:,} open files: raise "
            "its hard limit (`ulimit -Hn`, /etc/security/limits.conf)"
        )
    if soft != resource.RLIM_INFINITY and soft < need:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
    return f"up to {need:,} open files"


async def observe(setting: Setting, folder: Path) -> Observed:
    """Run one setting on a store of its own in the new `folder`.

    Raises TimeoutError, naming what did not come, and RuntimeError if a process ended early."""
    seen = Observed()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(EmbeddedServer(folder))
        store = await open_store(server.url)
        stack.push_async_callback(store.close)
        await store.create_run(RUN, recipe={}, recipe_hash=RUN, limits=limits_of(setting))
        buffer, ledger = await TimedBuffer.connect(store, seen.seconds), ArchiveLedger(folder / "ledger")
        learner = Learner(setting, buffer, ledger, seen)
        await learner.start()
        paths = [folder / f"report-{n}.json" for n in range(setting.processes)]
        encoded = msgspec.json.encode(setting).decode()
        commands: list[tuple[str, ...]] = [
            ("collectors", server.url, encoded, str(n), str(path)) for n, path in enumerate(paths)
        ]
        commands += [("rank", server.url)] * setting.ranks
        children = [
            await stack.enter_async_context(_child(folder / f"child-{n}.log", command))
            for n, command in enumerate(commands)
        ]
        for child in children:
            await child.ready()
        collectors, ranks = children[: setting.processes], children[setting.processes :]
        started = time.monotonic()
        await learner.train(collectors, ranks)
        for child in collectors:
            await child.ended()
        seen.clients_s = time.monotonic() - started
        stats, rows = await buffer.snapshot()
    reports = [msgspec.json.decode(path.read_bytes(), type=Report) for path in paths]
    account(seen, learner.trained, reports, rows)
    moved = ledger.read(lambda weights: True)
    seen.problems += ledger_problems(stats, rows, limits_of(setting))
    seen.problems += [*moved.problems, *moved_problems(stats, rows, moved.rows)]
    return seen


def account(
    seen: Observed, trained: Sequence[tuple[int, int]], reports: Sequence[Report], rows: Sequence[TicketRow]
) -> None:
    """What became of the groups that collectors were told are held. trained: (ordinal, attempt) of committed steps,
    whose payloads ranks have read. rows: what is in the store at the end."""
    safe = set(trained)
    safe |= {(r.ordinal, r.attempt) for r in rows if r.state in (State.HELD, State.LEASED) and r.has_payload}
    for report in reports:
        seen.lost += sum(group not in safe for group in report.held)
        seen.puts.update(report.puts)
        seen.clients_cpu_s += report.cpu_s
        for operation, seconds in report.seconds.items():
            seen.seconds.setdefault(operation, []).extend(seconds)
    seen.twice = sum(n - 1 for n in Counter(ordinal for ordinal, _ in trained).values())


class Learner:
    """Rank 0, without a model."""

    def __init__(self, setting: Setting, buffer: TimedBuffer, ledger: ArchiveLedger, seen: Observed) -> None:
        self.setting, self.buffer, self.ledger, self.seen = setting, buffer, ledger, seen
        self.trained: list[tuple[int, int]] = []
        self._lineage = 0
        self._checkpoints = [0]  # versions

    async def start(self) -> None:
        self._lineage = await self.buffer.new_lineage(parent=None, limits=self.buffer.limits)

    async def train(self, collectors: Sequence[Child], ranks: Sequence[Child]) -> None:
        """All steps, then the run's end."""
        setting, seen = self.setting, self.seen
        await self._announce(0)  # from here on collectors get tickets
        warm = setting.max_age + 1
        for step in range(setting.steps):
            if step == warm:
                began, cpu_s, trained = time.monotonic(), await self._store_cpu_s(), len(self.trained)
                seen.waited, seen.waited_for = {}, {}
            lease = await self._lease(step, collectors)
            due = time.monotonic() + setting.step_s  # fetching lies within the step, as in training
            while damaged := await self._fetch(lease, ranks):
                await self.buffer.quarantine(self._lineage, step, damaged, "corrupt")
                lease = await self._lease(step, collectors)
            await asyncio.sleep(due - time.monotonic())
            await self.buffer.commit(self._lineage, step)
            self.trained += [(header.ordinal, header.attempt) for header in lease.headers]
            await self.buffer.stats()
            await self._announce(step + 1)
            if (step + 1) % setting.checkpoint_every == 0:
                await self._checkpoint(step + 1)
        seen.wall_s, seen.trained = time.monotonic() - began, len(self.trained) - trained
        seen.store_cpu_s = await self._store_cpu_s() - cpu_s
        await self._measure()
        seen.connections = (await self.buffer.store.client.info("clients"))["connected_clients"]
        await self.buffer.finish()

    async def _announce(self, version: int) -> None:
        await self.buffer.announce(Weights(self._lineage, version), {"transport": "none"})

    async def _lease(self, step: int, collectors: Sequence[Child]) -> Lease:
        """The batch of a step; the time until it is there goes to those who were waited for."""
        deadline, wait_s = time.monotonic() + STEP_LIMIT_S, 0.0
        while True:
            asked = time.monotonic()
            answer = await self.buffer.lease(self._lineage, step, wait_s=wait_s)
            if isinstance(answer, Lease):
                return answer
            for child in collectors:
                child.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no batch for step {step} within {STEP_LIMIT_S:.0f} s: {answer.reason}")
            self._attribute(answer, time.monotonic() - asked)
            wait_s = SLICE_S

    def _attribute(self, waiting: Waiting, seconds: float) -> None:
        waited, by = self.seen.waited, self.seen.waited_for
        what = TICKETS if waiting.members else waiting.reason
        waited[what] = waited.get(what, 0.0) + seconds
        for who in waiting.members:
            by[who] = by.get(who, 0.0) + seconds / len(waiting.members)

    async def _fetch(self, lease: Lease, ranks: Sequence[Child]) -> list[int]:
        """Each rank reads its share; which groups are damaged."""
        shares = [
            replace(lease, ordinals=lease.ordinals[n :: len(ranks)], headers=lease.headers[n :: len(ranks)], uses=())
            for n in range(len(ranks))
        ]
        async with asyncio.timeout(STEP_LIMIT_S):
            found = await asyncio.gather(*(rank.fetch(share) for rank, share in zip(ranks, shares, strict=True)))
        self.seen.seconds.setdefault("payloads", []).extend(fetched.seconds for fetched in found)
        return [ordinal for fetched in found for ordinal in fetched.damaged]

    async def _checkpoint(self, version: int) -> None:
        """As with `checkpoint.keep_last: 2`. The store is largest right before rows leave it."""
        await self._measure()
        self._checkpoints = [self._checkpoints[-1], version]
        oldest = self._checkpoints[0]
        await self.buffer.checkpointed(self._lineage, version, oldest=oldest)
        if self.setting.archive:
            await move_settled(self.buffer, self.ledger, lineage=self._lineage, covered=Weights(self._lineage, oldest))

    async def _measure(self) -> None:
        self.seen.peak_bytes = max(self.seen.peak_bytes, await bytes_of_run(self.buffer))
        memory = await self.buffer.store.client.info("memory")
        if memory["used_memory"] > self.seen.server_bytes:
            self.seen.server_bytes, self.seen.connection_bytes = memory["used_memory"], memory["mem_clients_normal"]

    async def _store_cpu_s(self) -> float:
        cpu = await self.buffer.store.client.info("cpu")
        return float(cpu["used_cpu_user_main_thread"]) + float(cpu["used_cpu_sys_main_thread"])


class Child:
    """A process of `scale_clients`, by its pipes and its log."""

    def __init__(self, process: Process, log: Path) -> None:
        self.process, self._log = process, log

    async def ready(self) -> None:
        async with asyncio.timeout(START_LIMIT_S):
            assert self.process.stdout is not None
            if await self.process.stdout.readline() != READY:
                await self.process.wait()
                self.check()

    def check(self) -> None:
        """Raises RuntimeError if it has ended."""
        if self.process.returncode is not None:
            said = self._log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"a client process ended with code {self.process.returncode}: {said}")

    async def fetch(self, share: Lease) -> Fetched:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(msgspec.json.encode(share) + b"\n")
        line = await self.process.stdout.readline()
        if not line:
            await self.process.wait()
            self.check()
        return msgspec.json.decode(line, type=Fetched)

    async def ended(self) -> None:
        async with asyncio.timeout(END_LIMIT_S):
            if await self.process.wait() != 0:
                self.check()


@asynccontextmanager
async def _child(log: Path, arguments: Sequence[str]) -> AsyncIterator[Child]:
    """Ended with the context at the latest."""
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", MODULE, *arguments, stdin=PIPE, stdout=PIPE, stderr=errors
        )
    try:
        yield Child(process, log)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
