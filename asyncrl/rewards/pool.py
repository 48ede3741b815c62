"""Scores in worker processes that can be killed.

A thread cannot stop `5**5**5**5`, and neither can a signal handler: the interpreter holds on until it is done. So each
verifier is a process of its own (see `worker.py`), a call has a time limit from its start, and on expiry the process
group is killed. The next call in its place starts a new process first, which that call's limit does not include.

A built-in verifier needs microseconds, and a message costs more. So a worker that is free gets all calls that wait
then, as far as it should be done with them in BATCH_S. It answers each by itself: what a hanging or dying call had
before it in the batch is scored, what it had behind it waits again.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from asyncrl.rewards.parts import DIED, INVALID, MEMORY, TIMEOUT, Verdict
from asyncrl.rewards.worker import HEADER, Ready, Scored, Start

START_LIMIT_S = 60.0  # built-in tasks need 0.1 s; a task of a user's may import a library as heavy as torch
BATCH_S = 0.002  # what a call may wait for others of its batch while another worker is free
LATE_LOOP_S = 0.05  # a few turns of a busy event loop; little beside what a killed process costs
REAP_LIMIT_S = 5.0  # for the kernel to hand over a process that was killed
READ_BYTES = 65536  # a pipe holds no more


class VerifierError(Exception):
    """No score can be made: a worker does not start, or the pool is closed. One to three lines with the fix."""


class _Killed(VerifierError):
    """A process was ended by a signal while it started."""


class VerifierPool:
    """`workers` processes, each with a scorer built by `factory(**arguments)`; first come, first served.

    `factory` is "module:function", imported by the worker, returning a `worker.Scorer`; `arguments` hold JSON values.
    `memory_bytes`: that each may write to; None: any.
    """

    def __init__(
        self, factory: str, arguments: dict[str, Any], *, workers: int, memory_bytes: int | None = None
    ) -> None:
        self._start = msgspec.msgpack.encode(Start(factory, arguments, [*sys.path, os.getcwd()], memory_bytes))
        self._slots = [_Slot() for _ in range(workers)]
        self._idle: deque[_Slot] = deque()
        self._waiting: deque[_Call] = deque()
        self._serving: set[asyncio.Task[None]] = set()
        self._spent: list[asyncio.subprocess.Process] = []  # killed, and perhaps not yet reaped
        self._weights: Mapping[str, float] = {}
        self._started = self._closed = False

    @property
    def weights(self) -> Mapping[str, float]:
        """What the scorer's `part_weights` says. Known once a worker was ready."""
        return self._weights

    async def start(self) -> None:
        """Start all workers, before any score; once they have started, do nothing. Raises VerifierError, and ends all,
        if one cannot build its scorer."""
        if self._started:
            return
        outcomes = await asyncio.gather(*map(self._fill, self._slots), return_exceptions=True)
        for error in outcomes:
            if error is not None:
                await self.close()
                raise error
        self._idle.extend(self._slots)
        self._started = True

    async def verdict(self, row: object, answer: object, *, timeout_s: float, part: str = "") -> Scored:
        """What a worker says of one answer, and the seconds that took. `row` and `answer` are dataclasses or mappings;
        the scorer gets their fields. part: "" for its `score`, else what its `verify` is given.

        `timeout_s` limits the call from the moment a worker gets to it: the wait for that does not count, and is
        bounded because every call ahead of it is.

        Never raises for the task's faults: `failure` names them. Raises VerifierError if no process can be started any
        more or the pool was closed. Cancelling a call that a worker is at ends the worker.
        """
        if self._closed:
            raise VerifierError("the verifier pool is closed")
        try:
            request = msgspec.msgpack.encode((part, row, answer))
        except Exception as error:  # TypeError, OverflowError, UnicodeEncodeError, or what a type of the row's raises
            complaint = f"the row cannot be sent to the verifier: {type(error).__name__}: {error}"
            return Scored(Verdict({}, INVALID, complaint), 0.0)
        loop = asyncio.get_running_loop()
        call = _Call(request, part, timeout_s, loop.create_future())
        if not self._waiting:
            loop.call_soon(self._assign)  # after the others of this turn of the loop: answers often end together
        self._waiting.append(call)
        try:
            return await call.scored
        except asyncio.CancelledError:
            self._cancel(call)
            raise

    async def close(self) -> None:
        """Kill all workers and reap them. Calls in flight and later ones raise VerifierError."""
        self._closed = True
        for slot in self._slots:
            self._discard(slot)
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving, timeout=2 * REAP_LIMIT_S)
        for call in self._waiting:
            call.fail(VerifierError("the verifier pool was closed before this call was scored"))
        self._waiting.clear()
        for process in self._spent:
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), REAP_LIMIT_S)

    def _assign(self) -> None:
        """Give idle workers what waits, to each its part. Called whenever there is a new call or an idle worker."""
        while self._waiting and self._idle and not self._closed:
            slot = self._idle.popleft()
            part = math.ceil(len(self._waiting) / (1 + len(self._idle)))
            slot.batch.extend(self._waiting.popleft() for _ in range(min(part, slot.most)))
            task = asyncio.create_task(self._serve(slot))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve(self, slot: _Slot) -> None:
        """Have a slot's batch scored. What its worker did not come to waits again, before all others."""
        try:
            worker = await self._ready(slot)
            worker.send(msgspec.msgpack.encode([call.request for call in slot.batch]))
            while slot.batch and slot.worker is worker:
                for scored in await worker.scored(slot.batch[0]):
                    fatal = scored.verdict.failure in (TIMEOUT, DIED, MEMORY)  # of MEMORY, what is left may be little
                    if fatal and slot.worker is not worker:
                        break  # it was killed, for a call that was cancelled or by `close`: no call's fault
                    slot.learn(scored.seconds)
                    call = slot.batch.popleft()
                    if not call.scored.done():
                        call.scored.set_result(scored)
                    if fatal:
                        self._discard(slot)
        except Exception as error:
            # No worker can be started. That may pass: one call hears of it, not all that wait.
            self._discard(slot)
            slot.batch.popleft().fail(error)
        finally:
            self._waiting.extendleft(call for call in reversed(slot.batch) if not call.scored.done())
            slot.batch.clear()
            self._idle.append(slot)
            self._assign()

    def _cancel(self, call: _Call) -> None:
        """Nobody waits for this call any more. One that has others before it in a batch is scored all the same."""
        if call in self._waiting:
            self._waiting.remove(call)
        for slot in self._slots:
            if slot.batch and slot.batch[0] is call:
                self._discard(slot)

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
        try:
            slot.worker = await _Worker.start(self._start)
        except _Killed:  # for want of memory, or by a person: that passes, and a run should not end of it
            slot.worker = await _Worker.start(self._start)
        self._weights = slot.worker.weights

    def _discard(self, slot: _Slot) -> None:
        if slot.worker is not None:
            _kill(slot.worker.process)
            self._spent = [process for process in (*self._spent, slot.worker.process) if process.returncode is None]
            slot.worker = None


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """An answer to score. `request`: part, row and answer, encoded."""

    request: bytes
    part: str
    timeout_s: float
    scored: asyncio.Future[Scored]

    def fail(self, error: Exception) -> None:
        if not self.scored.done():
            self.scored.set_exception(error)

    @property
    def late(self) -> Scored:
        """What becomes of it when its time is over."""
        of, key = (f"part {self.part!r}", "its timeout_s") if self.part else ("score", "collector.score_timeout_s")
        return Scored(Verdict({}, TIMEOUT, f"{of} took longer than {key} = {self.timeout_s:g} s"), math.inf)


@dataclass(slots=True, eq=False)
class _Slot:
    """A place for a worker. Empty after its worker was killed, until the next call."""

    worker: _Worker | None = None
    batch: deque[_Call] = field(default_factory=deque)  # what the worker has; it is at the first
    most: int = 1  # calls of the next batch

    def learn(self, seconds: float) -> None:
        """After a call that took so long. One slow call, and the next ones go alone until several were quick again."""
        self.most = max(1, min(self.most + 1, int(BATCH_S / max(seconds, 1e-6))))


@dataclass(slots=True, eq=False)
class _Worker:
    """A verifier process that is ready."""

    process: asyncio.subprocess.Process
    weights: Mapping[str, float] = field(default_factory=dict)
    _received: bytearray = field(default_factory=bytearray)

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
        worker = cls(process)
        ready: Ready | None = None
        try:
            worker.send(start)
            try:
                messages = await worker._receive(START_LIMIT_S)
            except TimeoutError:
                raise VerifierError(
                    f"a verifier process was not ready after {START_LIMIT_S:.0f} s: "
                    "the import or the constructor of the task hangs"
                ) from None
            if not messages:
                code = await asyncio.wait_for(process.wait(), REAP_LIMIT_S)
                raise (_Killed if code < 0 else VerifierError)(
                    f"a verifier process ended with exit code {code} before it was ready: see its output above"
                )
            ready = msgspec.msgpack.decode(messages[0], type=Ready)
            if ready.error:
                raise VerifierError(f"a verifier process cannot build the task: {ready.error}")
            worker.weights = ready.weights
            return worker
        finally:
            if ready is None or ready.error:
                _kill(process)
                await asyncio.wait_for(process.wait(), REAP_LIMIT_S)

    def send(self, message: bytes) -> None:
        """Hand over a message. To a process that is gone nothing is sent, and reading finds its end."""
        if self.process.stdin is not None and not self.process.stdin.is_closing():
            self.process.stdin.write(HEADER.pack(len(message)) + message)

    async def scored(self, first: _Call) -> list[Scored]:
        """The outcomes of the calls it was sent, as far as they have arrived, one at least. first: that it has not
        answered yet. The failures TIMEOUT and DIED, after which the process is of no use, are those of the first call
        it did not answer."""
        try:
            messages = await self._receive(first.timeout_s)
        except TimeoutError:
            return [first.late]
        found = []
        for message in messages or [b""]:
            try:
                found.append(msgspec.msgpack.decode(message, type=Scored))
            except msgspec.DecodeError:  # a process that is gone, or rubbish from a forked child of the task's
                found.append(Scored(Verdict({}, DIED, "the verifier's process ended during the call"), math.inf))
                break
        return found

    async def _receive(self, limit_s: float) -> list[bytes]:
        """The messages that have arrived, one at least; none if the process is gone. Raises TimeoutError.

        A message that came in time counts though this process was too busy to look: after the limit the loop gets
        `LATE_LOOP_S` to hand over what has arrived. `asyncio.timeout` alone would throw it away.
        """
        if self.process.stdout is None:
            raise RuntimeError("a verifier process without pipes")
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(None) as limit:
            timer = loop.call_later(limit_s, lambda: limit.reschedule(loop.time() + LATE_LOOP_S))
            try:
                while not (messages := self._whole()):
                    if not (piece := await self.process.stdout.read(READ_BYTES)):
                        return []
                    self._received += piece
                return messages
            finally:
                timer.cancel()

    def _whole(self) -> list[bytes]:
        """Take the messages out of what was received that are whole."""
        messages, start = [], 0
        while len(self._received) >= (body := start + HEADER.size):
            end = body + HEADER.unpack_from(self._received, start)[0]
            if len(self._received) < end:
                break
            messages.append(bytes(self._received[body:end]))
            start = end
        del self._received[:start]
        return messages


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the process and every other of its group. The event loop reaps it."""
    with suppress(ProcessLookupError, PermissionError):  # macOS: EPERM when only zombies are left
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdin is not None:
        process.stdin.close()
