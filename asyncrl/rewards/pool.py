"""Scores in worker processes that can be killed.

A thread cannot stop `5**5**5**5`, and neither can a signal handler: the interpreter holds on until it is done. So each
verifier is a process of its own (see `worker.py`), a call has a time limit from its start, and on expiry the process
group is killed. The next call in its place starts a new process first, which that call's limit does not include.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import sys
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from asyncrl.rewards.parts import DIED, FAILURES, INVALID, TIMEOUT, Verdict, odd_names, weighted_sum
from asyncrl.rewards.worker import HEADER, Ready, Start

logger = logging.getLogger(__name__)

START_LIMIT_S = 60.0  # built-in tasks need 0.1 s; a task of a user's may import a library as heavy as torch
LATE_LOOP_S = 0.05  # a few turns of a busy event loop; little beside what a killed process costs
REAP_LIMIT_S = 5.0  # for the kernel to hand over a process that was killed


class VerifierError(Exception):
    """No score can be made: a worker does not start, or the pool is closed. One to three lines with the fix."""


@dataclass(frozen=True, slots=True)
class Score:
    """`parts` by name, None where one has no finite number. `reward` NaN = unscored; `failure` says why, else ""."""

    parts: dict[str, float | None]
    reward: float
    failure: str


class VerifierPool:
    """`workers` processes, each with a scorer built by `factory(**arguments)`; first come, first served.

    `factory` is "module:function", imported by the worker, returning a `worker.Scorer`; `arguments` hold JSON values.
    `timeout_s` limits one call from the moment a worker gets it: the wait for a free worker does not count, and is
    bounded because every call ahead of it is. `counts` has one entry per failure class, and "scored".
    """

    def __init__(self, factory: str, arguments: dict[str, Any], *, workers: int, timeout_s: float) -> None:
        self.counts: dict[str, int] = dict.fromkeys(("scored", *FAILURES), 0)
        self._start = msgspec.msgpack.encode(Start(factory, arguments, list(sys.path)))
        self._timeout_s = timeout_s
        self._slots = [_Slot() for _ in range(workers)]
        self._idle: asyncio.Queue[_Slot] = asyncio.Queue()
        self._spent: list[asyncio.subprocess.Process] = []  # killed, and perhaps not yet reaped
        self._names: tuple[str, ...] | None = None  # of the parts of the first score
        self._closed = False

    async def start(self) -> None:
        """Start all workers, before any score. Raises VerifierError, and ends all, if one cannot build its scorer."""
        outcomes = await asyncio.gather(*map(self._fill, self._slots), return_exceptions=True)
        for error in outcomes:
            if error is not None:
                await self.close()
                raise error
        for slot in self._slots:
            self._idle.put_nowait(slot)

    async def score(self, row: object, answer: object) -> Score:
        """Score one answer. `row` and `answer` are dataclasses or mappings; the scorer gets their fields.

        Never raises for the task's faults: `failure` names them. Raises VerifierError if no process can be started any
        more or the pool was closed. Cancelling ends the call's worker, whose reply would otherwise go to the next call.
        """
        try:
            request = msgspec.msgpack.encode((row, answer))
        except Exception as error:  # TypeError, OverflowError, UnicodeEncodeError, or what a type of the row's raises
            complaint = f"the row cannot be sent to the verifier: {type(error).__name__}: {error}"
            return self._finish(Verdict({}, INVALID, complaint), {})
        slot = await self._idle.get()
        try:
            worker = await self._ready(slot)
            fit = False
            try:
                verdict = await worker.call(request, self._timeout_s)
                fit = verdict.failure not in (TIMEOUT, DIED)
            finally:
                if not fit:
                    self._discard(slot)
            if self._closed:
                raise VerifierError("the verifier pool was closed during a call")
            return self._finish(verdict, worker.weights)
        finally:
            self._idle.put_nowait(slot)

    async def close(self) -> None:
        """Kill all workers and reap them. Calls in flight and later ones raise VerifierError."""
        self._closed = True
        for slot in self._slots:
            self._discard(slot)
        for process in self._spent:
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), REAP_LIMIT_S)

    async def _ready(self, slot: _Slot) -> _Worker:
        if slot.worker is not None and slot.worker.process.returncode is not None:
            self._discard(slot)  # it ended between calls, which is not this call's fault
        if not self._closed and slot.worker is None:
            await self._fill(slot)
        if self._closed:  # perhaps while it started
            self._discard(slot)
        if slot.worker is None:
            raise VerifierError("the verifier pool is closed")
        return slot.worker

    async def _fill(self, slot: _Slot) -> None:
        slot.worker = await _Worker.start(self._start)

    def _discard(self, slot: _Slot) -> None:
        if slot.worker is not None:
            _kill(slot.worker.process)
            self._spent = [process for process in (*self._spent, slot.worker.process) if process.returncode is None]
            slot.worker = None

    def _finish(self, verdict: Verdict, weights: Mapping[str, float]) -> Score:
        if not verdict.failure:
            if complaint := odd_names(verdict.parts, self._names, weights):
                verdict = Verdict(verdict.parts, INVALID, complaint)
            else:
                self._names = tuple(verdict.parts)
        outcome = verdict.failure or "scored"
        self.counts[outcome] += 1
        if verdict.failure and self.counts[outcome] == 1:
            # Later ones are only counted: a broken verifier fails each time.
            logger.warning("%s: %s", verdict.failure, verdict.detail)
        reward = math.nan if verdict.failure else weighted_sum(verdict.parts, weights)
        return Score(verdict.parts, reward, verdict.failure)


@dataclass(slots=True)
class _Slot:
    """A place for a worker. Empty after its worker was killed, until the next call."""

    worker: _Worker | None = None


@dataclass(frozen=True, slots=True)
class _Worker:
    """A verifier process that is ready. At most one call at a time."""

    process: asyncio.subprocess.Process
    weights: Mapping[str, float]

    @classmethod
    async def start(cls, start: bytes) -> _Worker:
        """Start a process and wait until its scorer is built. Raises VerifierError; kills the process if cancelled."""
        process = await asyncio.create_subprocess_exec(
            # -P: the working folder must not come first on sys.path: a json.py of the user's would hide the real one
            *(sys.executable, "-P", "-m", "asyncrl.rewards.worker", str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # a process group of its own, to be killed with all that the task started in it
        )
        ready: Ready | None = None
        try:
            reply = await _within(_exchange(process, start), START_LIMIT_S)
            if reply is None:
                raise VerifierError(
                    f"a verifier process was not ready after {START_LIMIT_S:.0f} s: "
                    "the import or the constructor of the task hangs"
                )
            if not reply:
                code = await asyncio.wait_for(process.wait(), REAP_LIMIT_S)
                raise VerifierError(
                    f"a verifier process ended with exit code {code} before it was ready: see its output above"
                )
            ready = msgspec.msgpack.decode(reply, type=Ready)
            if ready.error:
                raise VerifierError(f"a verifier process cannot build the task: {ready.error}")
            return cls(process, ready.weights)
        finally:
            if ready is None or ready.error:
                _kill(process)
                await asyncio.wait_for(process.wait(), REAP_LIMIT_S)

    async def call(self, request: bytes, timeout_s: float) -> Verdict:
        """The verdict on one request, or the failure TIMEOUT or DIED, after which the process is of no use.

        Called for every answer, so without the task that `_within` makes for each exchange. As there, the limit ends
        the call only after the loop had a last look at what has arrived.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as limit:
                timer = loop.call_later(timeout_s, lambda: limit.reschedule(loop.time() + LATE_LOOP_S))
                try:
                    reply = await _exchange(self.process, request)
                finally:
                    timer.cancel()
        except TimeoutError:
            return Verdict({}, TIMEOUT, f"score took longer than collector.score_timeout_s = {timeout_s:g} s")
        try:
            return msgspec.msgpack.decode(reply, type=Verdict)
        except (
            msgspec.DecodeError
        ):  # the empty reply of a process that is gone, or rubbish from a forked child of the task's
            return Verdict({}, DIED, "the verifier's process ended during the call")


async def _exchange(process: asyncio.subprocess.Process, request: bytes) -> bytes:
    """Send one message and read one; b"" if the process is gone."""
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("a verifier process without pipes")
    try:
        process.stdin.write(HEADER.pack(len(request)) + request)
        await process.stdin.drain()
        (size,) = HEADER.unpack(await process.stdout.readexactly(HEADER.size))
        return await process.stdout.readexactly(size)
    except (ConnectionError, asyncio.IncompleteReadError):
        return b""


async def _within(exchange: Coroutine[Any, Any, bytes], limit_s: float) -> bytes | None:
    """The exchange's reply, None if it is not there after `limit_s`.

    A reply that came in time counts though this process was too busy to look: after the limit the loop gets
    `LATE_LOOP_S` to hand over what has arrived. `asyncio.timeout` would throw it away.
    """
    task = asyncio.create_task(exchange)
    try:
        await asyncio.wait({task}, timeout=limit_s)
        if not task.done():
            await asyncio.wait({task}, timeout=LATE_LOOP_S)
        return task.result() if task.done() else None
    finally:
        task.cancel()


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the process and every other of its group. The event loop reaps it."""
    with suppress(ProcessLookupError, PermissionError):  # macOS: EPERM when only zombies are left
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdin is not None:
        process.stdin.close()
