"""When a checkpoint is written: beside training from a snapshot, one at a time, or while training stands.

| who waits                           | for what                    | who ends the wait                       |
|-------------------------------------|-----------------------------|-----------------------------------------|
| the step loop, when one is due      | the snapshot                | its copies                              |
| the same, before it takes the next  | the write that is under way | the disk; `limit_s` (raises)            |
| the end of a run, a signal's `stop` | the write that is under way | the disk; `limit_s` (raises), the grace |
| the write, once the file is there   | the store, for `on_saved`   | the store, or the limit of its outages  |

A write that fails costs nothing but itself: the checkpoints before it stay, training goes on, and the next one that is
due tries again. Only where it was the last of a run that is an error (`ensure`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.buffers.concurrency import end_all, in_thread
from asyncrl.learners.checkpoint import CheckpointError
from asyncrl.learners.snapshot import Copies, Keep, Snapshot, live
from asyncrl.learners.writing import write

log = logging.getLogger(__name__)

CLOSE_S = 60.0
"""What a learner that ends by an error leaves for a write that is under way, as a signal does by default."""

Take = Callable[[Keep], Snapshot]
"""Makes a snapshot of now; runs in a thread, while nothing changes the weights."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that is on the disk. Seconds: stall_s, of the step loop; save_s, from the snapshot to the rename."""

    snapshot: Snapshot
    path: Path
    stall_s: float
    save_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """One that is not. count: how many in a row."""

    snapshot: Snapshot
    error: CheckpointError
    count: int

    def __str__(self) -> str:
        again = "" if self.count == 1 else f" ({self.count} in a row)"
        return f"no checkpoint of version {self.snapshot.weights.version}{again}: {self.error}"


class Saver:
    """Writes into the folder `checkpoints`. Everything but the copying and the writing runs in one event loop."""

    def __init__(
        self,
        checkpoints: Path,
        *,
        tokenizer: Any,
        beside: bool,
        limit_s: float,
        on_saved: Callable[[Saved], Awaitable[None]],
        on_failed: Callable[[Failed], None],
        newest: int | None,
    ) -> None:
        """beside: write while training goes on. limit_s: longest that one write may keep others waiting. `on_saved` is
        awaited once the folder is there; what it raises, `check` and `settle` raise. newest: version of the newest
        checkpoint on this branch, if there is one."""
        self._checkpoints, self._tokenizer, self._limit_s = checkpoints, tokenizer, limit_s
        self._on_saved, self._on_failed = on_saved, on_failed
        self._copies = Copies() if beside else None
        self._newest = newest
        self._failed: Failed | None = None  # the last write, if it has
        self._writing: tuple[int, asyncio.Task[None]] | None = None  # version, the task that writes it
        self._given_up = threading.Event()
        self._stalled_s = 0.0

    async def save(self, version: int, take: Take) -> None:
        """Take a snapshot of `version` and have it written, unless it is saved already or being written. With `beside`
        this returns once the copies are made. Raises CheckpointError: an earlier write has not ended in `limit_s`."""
        if version == self._newest or (self._writing is not None and self._writing[0] == version):
            return
        started = time.monotonic()
        await self.settle()
        snapshot = await asyncio.to_thread(take, live if self._copies is None else self._copies.keep)
        stall_s = time.monotonic() - started
        task = asyncio.create_task(self._write(snapshot, stall_s), name=f"checkpoint of version {version}")
        self._writing = (version, task)
        if self._copies is None:
            await self.settle()
            stall_s = time.monotonic() - started
        self._stalled_s += stall_s

    async def ensure(self, version: int, take: Take) -> None:
        """Return once `version` is saved. Raises CheckpointError if it cannot be."""
        await self.settle()  # if it was of this version and has failed, this is the next that is due
        await self.save(version, take)
        await self.settle()
        if self._failed is not None:
            raise self._failed.error

    async def settle(self) -> None:
        """Wait for the write that is under way, if there is one."""
        if self._writing is None:
            return
        version, task = self._writing
        done, _ = await asyncio.wait({task}, timeout=self._limit_s)
        if not done:
            raise CheckpointError(
                f"the checkpoint of version {version} is being written to {self._checkpoints} for more than "
                f"{self._limit_s:.0f} s (run.no_progress_s): the disk does not answer"
            )
        self._writing = None
        task.result()

    def check(self) -> None:
        """Raise what ended the last write, where that is no error of the disk's. Waits for nothing."""
        if self._writing is not None and self._writing[1].done():
            _, task = self._writing
            self._writing = None
            task.result()

    def take_stalled(self) -> float:
        """Seconds that the step loop has stood for checkpoints since the last call."""
        stalled, self._stalled_s = self._stalled_s, 0.0
        return stalled

    async def close(self, *, give_up: bool) -> None:
        """Let a write that is under way end, within CLOSE_S. give_up: without a checkpoint, since it is another
        learner that goes on; the folder stays as it is."""
        if give_up:
            self._given_up.set()
        if self._writing is None:
            return
        version, task = self._writing
        await asyncio.wait({task}, timeout=min(self._limit_s, CLOSE_S))
        if not task.done():
            log.warning("the checkpoint of version %d is not written yet, and left unfinished", version)
        elif error := task.exception():  # the learner ends for a reason of its own, which is the one that matters
            log.warning("after the checkpoint of version %d: %s", version, error)
        await end_all([task])

    async def _write(self, snapshot: Snapshot, stall_s: float) -> None:
        started = time.monotonic()
        writing = partial(write, self._checkpoints, snapshot, tokenizer=self._tokenizer, given_up=self._given_up.is_set)
        try:
            path = await in_thread(writing)
        except CheckpointError as error:
            if not self._given_up.is_set():
                self._failed = Failed(snapshot, error, 1 + (self._failed.count if self._failed else 0))
                self._on_failed(self._failed)
            return
        self._failed = None
        save_s = time.monotonic() - started
        await self._on_saved(Saved(snapshot, path, stall_s + (save_s if self._copies is None else 0.0), save_s))
        self._newest = snapshot.weights.version
