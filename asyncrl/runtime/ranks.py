"""The other ranks of a learner on one host: processes that rank 0 starts, watches and ends (`launched.py`: those that
torchrun starts).

They are tied to it like all children of a run. The end of one, whatever the reason, ends the others at once: what they
have open to rank 0 closes with them, so that no collective of its own waits for a rank that will not come.
"""

from __future__ import annotations

import asyncio
import importlib
import signal
import tempfile
import time
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil

from asyncrl.config.recipe import Recipe, to_builtins
from asyncrl.learners.lost import RankLost
from asyncrl.runtime.children import Child, how_it_ended
from asyncrl.runtime.folder import locked

if TYPE_CHECKING:
    from asyncrl.learners.parallel import Meeting, Ranks, Sharded, Watch

MEET_S = 300.0
"""For the others to import torch and reach the meeting, however busy the host is."""

LOOK_S = 0.1
"""How often rank 0 looks who has come. The end of a rank and the stop do not wait for it."""

NOTICE_S = 5.0
"""A connection that closes is noticed before the exit that closed it: what rank 0 waits for the name of the reason."""

LEAVE_S = 10.0
"""What a rank gets to leave when training is over."""

GONE_S = 60.0
"""For what is left of a learner that was killed to give back its memory, a GPU's too. The kernel ends it at once, but a
process of many GiB takes its time."""

MARGIN_S = 120.0
"""Of the silence that the other ranks bear, beyond the limits of what rank 0 waits for meanwhile."""


@asynccontextmanager
async def ranks_of(recipe: Recipe, *, url: str, folder: Path, stop: asyncio.Event) -> AsyncIterator[Ranks | None]:
    """The ranks of a learner that trains into `folder`, seen from rank 0, which is this process; None if stopped while
    they came together. Raises RankLost if one does not come, RunFolderError if those of a learner that was killed are
    still there."""
    size = recipe.learner.ranks
    if size == 1 and not (recipe.learner.cpu_offload and await asyncio.to_thread(_has_gpu)):
        from asyncrl.learners.parallel import ALONE

        yield ALONE
        return
    if size == 1:  # what keeps weights in host memory works on a process group, which may be of one
        with tempfile.TemporaryDirectory(prefix="asyncrl-rank-") as meeting:
            ranks = await asyncio.to_thread(meet_in, Path(meeting), recipe, 0)
            try:
                yield ranks
            finally:
                ranks.close()
        return
    with tempfile.TemporaryDirectory(prefix="asyncrl-ranks-") as meeting, ExitStack() as held:
        lock = await asyncio.to_thread(held.enter_context, locked(folder, "learner", wait_s=GONE_S))
        processes = RankProcesses(size, folder=folder, meeting=Path(meeting), limit_s=recipe.run.no_progress_s)
        try:
            await processes.start(recipe, url, inherits=[lock])
            # They import for seconds; so does this process, at the same time.
            await asyncio.to_thread(importlib.import_module, "asyncrl.learners.service")
            if not await processes.met(stop):
                yield None
                return
            ranks = await asyncio.to_thread(meet_in, Path(meeting), recipe, 0, processes)
            try:
                yield ranks
            except Exception as error:
                cause = await processes.cause(error)
                if cause is error:
                    raise
                raise cause from error
            await asyncio.to_thread(ranks.close)
            await processes.leave()
        finally:
            await processes.kill()


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def meet_in(folder: Path, recipe: Recipe, rank: int, watch: RankProcesses | None = None) -> Sharded:
    """Become one of the ranks of this host that come to `folder`. Blocks."""
    from asyncrl.learners.parallel import in_folder

    if rank > 0:
        (folder / str(rank)).touch()
    return sharded(recipe, rank, in_folder(folder, rank, recipe.learner.ranks), watch)


def sharded(recipe: Recipe, rank: int, meeting: Meeting, watch: Watch | None) -> Sharded:
    """Become one of the ranks that meet there, with the recipe's limits. Blocks."""
    from asyncrl.learners.parallel import Sharded

    return Sharded(
        rank,
        recipe.learner.ranks,
        meeting=meeting,
        step_s=recipe.run.no_progress_s,
        silence_s=recipe.run.no_progress_s + 2 * recipe.weights.deadline_s + MARGIN_S,
        watch=watch,
    )


class RankProcesses:
    """Ranks 1 .. size - 1 of a learner whose rank 0 is this process. limit_s: of one collective."""

    def __init__(self, size: int, *, folder: Path, meeting: Path, limit_s: float) -> None:
        arguments = ["learner", "-", "--meeting", str(meeting), "--rank"]
        self._children = [
            Child(f"learner-{rank}", [*arguments, str(rank)], log=folder / "logs" / f"learner-{rank}.log")
            for rank in range(1, size)
        ]
        self._meeting = meeting
        self._limit_s = limit_s
        self._leaving = False
        self._lost = ""  # which rank ended first, and how

    async def start(self, recipe: Recipe, url: str, *, inherits: Sequence[int] = ()) -> None:
        """Start them all, with these open files; each says in the meeting's folder that it has come."""
        document = msgspec.json.encode(to_builtins(recipe))
        for rank, child in self._numbered():
            await child.start({"ASYNCRL_BUFFER": url}, stdin=document, inherits=inherits)
            child.exited.add_done_callback(lambda _, rank=rank, child=child: self._on_exit(rank, child))  # type: ignore[misc]

    async def met(self, stop: asyncio.Event) -> bool:
        """Wait until all have come; False when `stop` is set. Raises RankLost."""
        started = time.monotonic()
        while missing := [(n, child) for n, child in self._numbered() if not (self._meeting / str(n)).exists()]:
            self.check()
            if time.monotonic() - started > MEET_S:
                rank, child = missing[0]
                raise RankLost(f"learner rank {rank} did not come within {MEET_S:.0f} s\nIts log: {child.log}")
            try:
                await asyncio.wait_for(stop.wait(), LOOK_S)
            except TimeoutError:
                continue
            return False
        return True

    def check(self) -> None:
        """Raises RankLost if a rank has ended."""
        if self._lost:
            raise RankLost(self._lost)

    async def cause(self, error: Exception) -> Exception:
        """RankLost if `error` of rank 0 comes from a rank that ended or does not answer, else `error`."""
        if isinstance(error, RankLost) or not may_be_of_a_collective(error):
            return error
        await asyncio.wait([child.exited for child in self._children], timeout=NOTICE_S, return_when=FIRST_COMPLETED)
        if self._lost:
            return RankLost(self._lost)
        if "Timed out" in str(error):  # Gloo's words; it does not say whom it waited for
            states = (f"rank {n} (process {child.pid}) is {_state(child.pid)}" for n, child in self._numbered())
            return RankLost(f"no answer within run.no_progress_s, {self._limit_s:.0f} s: learner {', '.join(states)}")
        return error

    async def leave(self) -> None:
        """Training is over: let them end."""
        self._leaving = True
        await asyncio.wait([child.exited for child in self._children], timeout=LEAVE_S)

    async def kill(self) -> None:
        """End what is left of them."""
        self._leaving = True
        for child in self._children:
            await child.kill()

    def _numbered(self) -> Iterator[tuple[int, Child]]:
        return enumerate(self._children, start=1)

    def _on_exit(self, rank: int, child: Child) -> None:
        if self._leaving or self._lost:
            return
        code = child.exited.result()
        said = child.complaint() if code > 0 else ""
        name = f"learner rank {rank} (process {child.pid})"
        self._lost = f"{name} {how_it_ended(code)}; its log: {child.log}{f': {said}' if said else ''}"
        for other in self._children:
            other.signal_group(signal.SIGKILL)


def may_be_of_a_collective(error: Exception) -> bool:
    """torch raises RuntimeError, or classes of its own made from it, for what goes wrong between ranks."""
    return isinstance(error, RuntimeError) and type(error).__module__.partition(".")[0] in ("builtins", "torch")


def _state(pid: int) -> str:
    """running, sleeping, stopped ..."""
    try:
        return str(psutil.Process(pid).status())  # type: ignore[no-untyped-call]
    except psutil.NoSuchProcess:
        return "gone"
