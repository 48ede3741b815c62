"""`asyncrl run`: store, learner and collector as children of one process that watches them and does nothing else.

It starts what a person could start by hand, with the same commands. The learner's end is the run's end; a process that
dies is started again. Whatever happens to this process, no child outlives it (see `tether`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from asyncrl.buffers.base import BufferError, Stats
from asyncrl.buffers.blocked import IN_MESSAGE, process_state
from asyncrl.buffers.remote import RedisBuffer
from asyncrl.buffers.server import EmbeddedServer
from asyncrl.buffers.store import Store, open_store
from asyncrl.config.devices import Placement, collector_devices, with_devices
from asyncrl.config.recipe import Recipe
from asyncrl.learners.phase import read as read_phase
from asyncrl.runtime.children import Child, how_it_ended
from asyncrl.runtime.hopeless import causes, nothing_usable
from asyncrl.runtime.learner_keeper import LearnerKeeper
from asyncrl.runtime.models import BUILTIN_TINY
from asyncrl.runtime.preflight import EMBEDDED
from asyncrl.runtime.restarts import LIMIT, WINDOW_S, Restarts
from asyncrl.runtime.sinks import Sinks
from asyncrl.runtime.status import who_waits
from asyncrl.runtime.store_keeper import StoreKeeper
from asyncrl.runtime.tail import JsonLines
from asyncrl.telemetry.console import RunConsole

TICK_S = 0.5
"""How often the console is drawn. Ends of processes and signals do not wait for it."""

STATS_S = 5.0
"""Longest a look into the store may take; without an answer the console shows the last one."""

LEAVE_S = 10.0
"""What a collector gets to leave after the learner has ended."""

HANG_S = 120.0
"""Beyond run.no_progress_s, after which the learner ends by itself and says why, the learner itself must hang, and is
taken for dead."""

SHUTDOWN_S = 50.0
"""Beyond the learner's grace: for collectors, sinks and the store to end in order."""

USAGE = 2
"""Exit code of a process that was given something it cannot work with: starting it again cannot help."""


class Supervisor:
    """One run in one folder. `run` returns its exit code; `failure` then says why it is not 0.

    placement: the GPUs of each side. They go to its process, not into the recipe that others take from the store.
    """

    def __init__(self, recipe: Recipe, folder: Path, *, placement: Placement, resume: bool) -> None:
        self.failure = ""
        self._recipe = recipe
        self._folder = folder
        self._console = RunConsole(recipe.run.max_steps, terminal=sys.stdout.isatty(), file=sys.stdout)
        self._metrics = JsonLines(folder / "metrics.jsonl", from_end=resume)
        self._sinks = Sinks(recipe, folder, resume=resume)
        self._learner = LearnerKeeper(with_devices(recipe, placement), folder, resume=resume)
        arguments = ["collector", "--run", recipe.run.name, "--name", "collector-0"]
        if devices := collector_devices(placement):
            arguments += ["--set", f"collector.devices={devices}"]
        self._collector = Child("collector-0", arguments, log=folder / "logs" / "collector-0.log")
        self._restarts = Restarts()
        self._step = 0
        self._moved = time.monotonic()
        self._keeper: StoreKeeper | None = None
        self._store: Store | None = None
        self._buffer: RedisBuffer | None = None
        self._stats: Stats | None = None

    async def run(self, stop: asyncio.Event) -> int:
        """Start everything, watch it until the learner ends or `stop` is set, end everything."""
        async with self._served() as url:
            # The URL goes through the environment, not the arguments: it may hold a password, and `ps` shows those.
            environment = {"ASYNCRL_BUFFER": url}
            try:
                self._console.note(self._beginning())
                await self._sinks.start()
                await self._learner.start(environment)
                await self._collector.start(environment)
                return await self._watch(url, environment, stop)
            finally:
                await self._learner.process.kill()
                await self._collector.kill()
                for line in await self._sinks.close():
                    self._console.note(line)
                self._console.close()
                if self._store is not None:
                    await self._store.close()

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[str]:
        if self._recipe.buffer.url != EMBEDDED:
            yield self._recipe.buffer.url
            return
        async with EmbeddedServer(self._folder) as server:
            self._keeper = StoreKeeper(server, self._console.note)
            yield server.url

    def _beginning(self) -> str:
        """What a person reads while nothing else can be shown yet."""
        made = (
            "; the built-in model is made first if it is not cached (15 s)"
            if self._recipe.model.path == BUILTIN_TINY
            else ""
        )
        return f"starting learner and collector, which log to {self._folder / 'logs'}{made}"

    async def _watch(self, url: str, environment: dict[str, str], stop: asyncio.Event) -> int:
        stopping = asyncio.create_task(stop.wait())
        try:
            while True:
                await self._next_event(stopping)
                lost = None if self._keeper is None else self._keeper.tend(self._step)
                running = self._learner.process.running  # before the look, which then sees all that it has written
                await self._look(url)
                if stop.is_set():
                    return await self._stop_all()
                if (code := await self._tend_learner(environment, running)) is not None:
                    return code
                if (failure := lost or self._trouble()) is not None:
                    self.failure = failure
                    await self._stop_all()
                    return 1
                if (code := await self._tend_collector(environment)) is not None:
                    await self._stop_all()
                    return code
        finally:
            stopping.cancel()

    async def _next_event(self, stopping: asyncio.Task[bool]) -> None:
        waited: set[asyncio.Task[Any]] = {stopping}
        if self._learner.process.running:
            waited.add(self._learner.process.exited)
        if not self._restarts.waiting and self._collector.running:
            waited.add(self._collector.exited)
        await asyncio.wait(waited, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)

    def _trouble(self) -> str | None:
        """What ends the run besides its processes' own ends."""
        if self._stats is None:
            return None
        failed = nothing_usable(self._stats, groups_per_step=self._recipe.learner.groups_per_step)
        log = self._collector.log
        return "\n".join([failed, *causes(log), f"Its log: {log}"]) if failed else None

    async def _tend_learner(self, environment: dict[str, str], running: bool) -> int | None:
        """Start the learner again where it died; the run's exit code where it has ended. `running`: it was, a moment
        ago."""
        if self._keeper is not None and self._keeper.down:  # only the store knows whether it failed, and it needs one
            return None
        if self._learner.waiting:
            if self._learner.due():
                await self._learner.start(environment)
                self._moved = time.monotonic()
            return None
        if running:
            limit = self._recipe.run.no_progress_s + HANG_S
            if time.monotonic() - self._moved <= limit:
                return None
            reason = f"no step for {limit:.0f} s and no word from the learner"
            return await self._learner_died(reason, [reason, *self._who_waits()])
        if self._learner.has_died(self._stats):
            return await self._learner_died(self._learner.reason(), [])
        return await self._learner_ended()

    async def _learner_died(self, reason: str, words: list[str]) -> int | None:
        """Have it started again; the exit code where that has been tried often enough. `words`: that end the run then,
        before the learner's own."""
        words = [*words, self._learner.process.last_words(), *self._stopped_collector()]
        if await self._learner.plan_restart(reason):
            return None
        tried = self._learner.tried()
        await self._finish(" ".join([*tried, reason]))
        self.failure = "\n".join([*tried, *words])
        await self._end_collector(LEAVE_S)
        return 1

    async def _finish(self, error: str) -> None:
        """Tell collectors, on other hosts too, that nobody will train what they make."""
        if self._buffer is None:
            return
        try:
            async with asyncio.timeout(STATS_S):
                await self._buffer.finish(error=error)
        except (BufferError, OSError, TimeoutError) as second:
            self._console.note(f"collectors could not be told that the run failed: {second}")

    def _who_waits(self) -> list[str]:
        """By the last look into the store; nothing where there never was one."""
        if self._stats is None or self._buffer is None:
            return []
        return who_waits(self._stats, self._buffer.limits, read_phase(self._folder), most=IN_MESSAGE)

    async def _tend_collector(self, environment: dict[str, str]) -> int | None:
        """Start the collector again where it died; an exit code where that cannot help."""
        now = time.monotonic()
        if self._restarts.waiting:
            if self._restarts.due(now):
                await self._collector.start(environment)
            return None
        if self._collector.running or (self._stats is not None and self._stats.phase == "ended"):
            return None
        code = self._collector.exited.result()
        await self._collector.kill()  # what it left behind of its own children
        if code == USAGE:
            self.failure = self._collector.complaint() or self._collector.last_words()
            return USAGE
        delay = self._restarts.died(now, self._step)
        if delay is None:
            self.failure = (
                f"{self._collector.name} ended {self._restarts.count} times in {WINDOW_S / 60:.0f} minutes without a "
                f"step in between\n{self._collector.last_words()}"
            )
            return 1
        self._console.note(
            f"{self._collector.name} {how_it_ended(code)}; starting it again in {delay:.0f} s "
            f"({self._restarts.count} of {LIMIT}); its log: {self._collector.log}"
        )
        return None

    async def _learner_ended(self) -> int:
        learner = self._learner.process
        code = learner.exited.result()
        stopped = self._stopped_collector()
        await self._end_collector(LEAVE_S if code == 0 else 0.0)  # the store has told it that the run has ended
        if code == 0:
            return 0
        if code == USAGE:
            self.failure = learner.complaint() or learner.last_words()
            return USAGE
        self.failure = "\n".join([learner.last_words(), *stopped])
        return 1

    async def _end_collector(self, by_itself_s: float) -> None:
        """See it end, at first by itself."""
        await self._collector.ended(by_itself_s)
        self._collector.terminate()
        await self._collector.ended(LEAVE_S)

    def _stopped_collector(self) -> list[str]:
        """The collector, if it is there but does nothing: the store forgets one that it has given up."""
        if not self._collector.running or not (state := process_state(self._collector.pid, socket.gethostname())):
            return []
        return [f"{self._collector.name}, process {self._collector.pid}, {state}"]

    async def _stop_all(self) -> int:
        """Let the learner checkpoint within the grace, then let go."""
        self._learner.process.terminate()
        self._collector.terminate()
        deadline = time.monotonic() + self._recipe.run.grace_s
        while not await self._learner.process.ended(TICK_S):
            if self._keeper is not None:  # the learner needs the store to the end
                self._keeper.tend(self._step)
            if time.monotonic() > deadline:
                self._console.note(f"the learner did not stop within {self._recipe.run.grace_s:.0f} s; ending it")
                break
        await self._collector.ended(LEAVE_S)
        return 0

    async def _look(self, url: str) -> None:
        """Show what is new in the metrics and the store."""
        for record in self._metrics.read():
            if "step" in record and "event" not in record:
                self._step = int(record["step"])
                self._moved = time.monotonic()
            self._learner.on_record(record)
            self._console.on_record(record)
        for line in self._sinks.news():
            self._console.note(line)
        if self._keeper is None or not self._keeper.down:
            # A store that does not answer now is no reason to end a run that the learner goes on with: the last
            # snapshot stays on the console, and the processes that need the store have deadlines of their own.
            with suppress(BufferError, OSError, TimeoutError):
                async with asyncio.timeout(STATS_S):
                    await self._ask(url)
        if self._stats is not None:
            self._console.on_stats({**dataclasses.asdict(self._stats), "reasons": self._stats.lost})

    async def _ask(self, url: str) -> None:
        if self._store is None:
            self._store = await open_store(url)
        if self._buffer is None:
            self._buffer = await self._store.find_run(self._recipe.run.name)
        if self._buffer is not None:
            self._stats = await self._buffer.stats()
