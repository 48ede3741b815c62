"""The reward part `reward-model`, seen from the collector: its process, and the answers that wait for it.

While the process scores, answers come together; it then gets what waits, and divides that into batches by length. It
never shares a process with what generates: torch would hold the collector's event loop, and its memory could not be
had back.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from asyncrl.config.rewards import RewardModel, part_name
from asyncrl.rewards.base import Finding, Unscored
from asyncrl.rewards.conversation import answered, asked
from asyncrl.rewards.pool import REAP_LIMIT_S, VerifierError
from asyncrl.rewards.reward_model_process import Loaded, Number
from asyncrl.rewards.worker import HEADER

TIMEOUT = "reward_model_timeout"
DIED = "reward_model_died"

LOAD_LIMIT_S = 1800.0  # a model of tens of GB that is still to be downloaded
MOST = 256
"""Answers that the process gets at once: several batches, so that they can be divided by length, and few enough that
those which come meanwhile do not wait long for theirs."""


@dataclass(slots=True, eq=False)
class _Call:
    """An answer to score. body: its conversation, encoded: one that cannot be sent fails alone."""

    body: msgspec.Raw
    scored: asyncio.Future[Number] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class RewardModelPart:
    """Asks the model; many answers at once. A Remote."""

    def __init__(self, part: RewardModel) -> None:
        self._part = part
        self._name = part_name(part)
        self._waiting: deque[_Call] = deque()
        self._serving: asyncio.Task[None] | None = None
        self._process: _Scores | None = None
        self._closed = False

    async def start(self) -> None:
        """Load it. Raises VerifierError."""
        self._process = await _Scores.start(self._name, self._part)

    async def verify(self, row: Mapping[str, Any], answer: Mapping[str, Any]) -> Finding:
        """See Remote. Raises Unscored, and VerifierError if the model cannot be loaded any more."""
        if self._closed:
            raise VerifierError(f"the reward model {self._name!r} is closed")
        call = _Call(msgspec.Raw(msgspec.msgpack.encode(asked(row) + answered(answer))))
        self._waiting.append(call)
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        try:
            number = await call.scored  # its batch has a limit, and so has each before it
        finally:
            if call in self._waiting:  # cancelled; a call that the process has is scored for nobody
                self._waiting.remove(call)
        if number.failure:
            raise Unscored(number.failure, number.detail)
        return Finding({self._name: number.value})  # NaN is told by what looks at every finding

    async def close(self) -> None:
        """End the process; calls in flight and later ones raise VerifierError."""
        self._closed = True
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait({self._serving}, timeout=REAP_LIMIT_S)
        if self._process is not None:
            await self._process.end()

    async def _serve(self) -> None:
        """Have scored what waits, until nothing does. Every call that is taken from those waiting gets its end here."""
        batch: list[_Call] = []
        error: Exception = VerifierError(f"the reward model {self._name!r} was closed before this answer was scored")
        try:
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(MOST, len(self._waiting)))]
                await self._score(batch)
        except Exception as fault:  # the model cannot be loaded again: those that wait hear of it, later ones try anew
            error = fault
        finally:
            self._serving = None
            for call in [*batch, *self._waiting]:
                if not call.scored.done():
                    call.scored.set_exception(error)
            self._waiting.clear()

    async def _score(self, batch: Sequence[_Call]) -> None:
        if self._process is None:
            self._process = await _Scores.start(self._name, self._part)
        left = dict(enumerate(batch))
        try:
            self._process.send(msgspec.msgpack.encode([call.body for call in batch]))
            while left:
                async with asyncio.timeout(self._part.timeout_s):
                    numbers = msgspec.msgpack.decode(await self._process.frame(), type=list[Number])
                for number in numbers:
                    call = left.pop(number.index)
                    if not call.scored.done():  # cancelled
                        call.scored.set_result(number)
        except TimeoutError:
            await self._lose(left, TIMEOUT, f"a batch took longer than timeout_s = {self._part.timeout_s:g} s")
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError):  # a library has found the stream
            await self._lose(left, DIED, "the reward model's process ended during the call: see its output above")

    async def _lose(self, left: Mapping[int, _Call], failure: str, detail: str) -> None:
        """Nothing more comes of these: the process is ended, and the next call starts another one."""
        process, self._process = self._process, None
        for index, call in left.items():
            if not call.scored.done():
                call.scored.set_result(Number(index, failure=failure, detail=detail))
        if process is not None:
            await process.end()


class _Scores:
    """The process, once it has loaded the model."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, name: str, part: RewardModel) -> _Scores:
        """Raises VerifierError; leaves no process behind if it does, or is cancelled."""
        process = await asyncio.create_subprocess_exec(
            # -P: the working folder must not come first on sys.path: a json.py in it would hide the real one
            *(sys.executable, "-P", "-m", "asyncrl.rewards.reward_model_process", str(os.getpid())),
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,
        )
        scores = cls(process)
        loaded: Loaded | None = None
        try:
            scores.send(msgspec.msgpack.encode(part))
            async with asyncio.timeout(LOAD_LIMIT_S):
                loaded = msgspec.msgpack.decode(await scores.frame(), type=Loaded)
        except TimeoutError:
            raise VerifierError(f"the reward model {name!r} was not loaded within {LOAD_LIMIT_S:.0f} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise VerifierError(
                f"the process of the reward model {name!r} ended before it had loaded {part.path}: see its output above"
            ) from None
        finally:
            if loaded is None or loaded.error:
                await scores.end()
        if loaded.error:
            raise VerifierError(
                f"the reward model {name!r} cannot be loaded: {loaded.error}\n"
                "Mend path, revision, dtype and device of this part of task.rewards"
            )
        return scores

    def send(self, body: bytes) -> None:
        """To a process that is gone nothing is sent, and reading finds its end."""
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(HEADER.pack(len(body)) + body)

    async def frame(self) -> bytes:
        """The next one. Raises IncompleteReadError or ConnectionError at the end of them."""
        assert self._process.stdout is not None
        (size,) = HEADER.unpack(await self._process.stdout.readexactly(HEADER.size))
        return await self._process.stdout.readexactly(size)

    async def end(self) -> None:
        """Kill it and what it started."""
        with suppress(ProcessLookupError, PermissionError):  # nothing is left of the group
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), REAP_LIMIT_S)
