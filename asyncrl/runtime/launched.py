"""The ranks of a learner that torchrun started, on one host or several: how they meet, what they know of each other.

No rank is another's child here, so they speak through the store of keys that torchrun serves. Below `asyncrl/`:

| key             | written by          | says                                                                        |
|-----------------|---------------------|-----------------------------------------------------------------------------|
| `folder`        | rank 0              | the run's folder: torchrun has started ranks before, which trained into it  |
| `starts`        | rank 0, counting    | the number of this start; torchrun's own count can differ between hosts     |
| `knock/RANK`    | another rank        | a number of its own, anew with each process                                 |
| `welcome/KNOCK` | rank 0              | the start that this process belongs to                                      |
| `START/here/RANK` | each rank, once   | where it is (`Here`)                                                        |
| `START/met`     | rank 0, once        | where all are: training may begin                                           |
| `START/beat/RANK` | each rank         | a count that grows while its process lives                                  |
| `START/failed`  | ranks, appending    | what they failed of (`Failed`)                                              |
| `START/stop`    | any rank            | it was asked to stop: the run saves and ends                                |
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
import uuid
from asyncio import AbstractEventLoop
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil

from asyncrl.config.recipe import Recipe
from asyncrl.learners.lost import RankLost
from asyncrl.runtime.launch import Launch, LaunchError
from asyncrl.runtime.ranks import LOOK_S, MEET_S, may_be_of_a_collective, sharded

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

    from asyncrl.learners.parallel import Meeting, Sharded

PREPARE_S = 1800.0
"""For rank 0 to have a model and its run before it welcomes the others: a model may be downloaded."""

ANSWER_S = 60.0
"""For one answer of the store, which is a thread of torchrun that does nothing else."""

BEAT_S = 1.0
LOST_S = 10.0
"""Ten beats: a rank that is silent so long when something between the ranks has failed is what it failed of. torchrun
gives 30 s from the end of one rank to that of all others on its host; the name must be known by then."""

SILENT_S = 60.0
"""A rank that is silent so long while nothing is asked of it is lost."""


class Here(msgspec.Struct, frozen=True):
    host: str
    pid: int
    address: str  # by which others reach it


class Failed(msgspec.Struct, frozen=True):
    rank: int
    message: str


def connected(launch: Launch) -> TCPStore:
    """A connection to torchrun's store, for one thread. Raises LaunchError."""
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistNetworkError

    try:
        limit = timedelta(seconds=ANSWER_S)
        return TCPStore(launch.address, launch.port, is_master=False, timeout=limit, wait_for_workers=False)
    except DistNetworkError as error:
        raise LaunchError(
            f"torchrun's store at {launch.address}, port {launch.port} does not answer: {str(error).splitlines()[0]}"
        ) from error


def earlier_folder(launch: Launch) -> Path | None:
    """The folder of the run, if ranks that this torchrun started before have opened it."""
    store = connected(launch)
    return Path(store.get("asyncrl/folder").decode()) if store.check(["asyncrl/folder"]) else None


def note_folder(launch: Launch, folder: Path) -> None:
    """As rank 0: ranks that torchrun starts after these go on with this run."""
    connected(launch).set("asyncrl/folder", str(folder))


@asynccontextmanager
async def launched_ranks(recipe: Recipe, launch: Launch, *, stop: asyncio.Event) -> AsyncIterator[Sharded | None]:
    """The ranks of a learner, seen from any of them; None if stopped while they came together.

    `stop`, set on any rank, is set on rank 0. Where the work fails, the others hear why. Raises RankLost where one does
    not come, and for what fails because another has; LaunchError where hosts cannot reach each other.
    """
    peers = Peers(await asyncio.to_thread(connected, launch), launch, limit_s=recipe.run.no_progress_s)
    asked = asyncio.create_task(stop.wait())
    try:
        meeting = await peers.meet(stop, interface=recipe.weights.interface)
        if meeting is None:
            yield None
            return
        if launch.rank == 0:
            peers.on_stop(asyncio.get_running_loop(), stop)
        else:
            asked.add_done_callback(lambda task: None if task.cancelled() else peers.ask_to_stop())
        ranks = await asyncio.to_thread(sharded, recipe, launch.rank, meeting, peers)
        yield ranks
        await asyncio.to_thread(ranks.close)
    except Exception as error:
        cause = await peers.cause(error)
        if cause is error:
            peers.complain(str(error) or type(error).__name__)
            raise
        if launch.rank == 0:  # the others end for the same reason
            peers.complain(str(cause))
        raise cause from error
    finally:
        asked.cancel()
        await asyncio.to_thread(peers.close)


class Peers:
    """The ranks of one start, seen from one of them. limit_s: of one collective."""

    def __init__(self, store: TCPStore, launch: Launch, *, limit_s: float) -> None:
        self._store = self._beats = store
        self._launch = launch
        self._limit_s = limit_s
        self._start = 0
        self._welcomed: dict[int, bytes] = {}
        self._here: list[Here] = []
        self._beating = threading.Thread(target=self._beat, name="beats", daemon=True)  # may hang with its store
        self._over = threading.Event()
        self._stopping = threading.Event()
        self._listening = threading.Event()
        self._told: Callable[[], None] = lambda: None
        # What the thread has heard; `_lock` is held for as long as it takes to look.
        self._lock = threading.Lock()
        self._failed: list[Failed] = []
        self._heard: dict[int, tuple[bytes, float]] = {}  # rank -> its last beat, and when that was new
        self._answered = time.monotonic()
        self._gone = ""  # why the store does not answer any more

    async def meet(self, stop: asyncio.Event, *, interface: str | None) -> Meeting | None:
        """Wait until all ranks have come; None when `stop` is set. interface: of this host, None: by which it reaches
        torchrun's store. Raises RankLost, LaunchError."""
        from torch._C._distributed_c10d import PrefixStore

        from asyncrl.learners.parallel import Meeting

        found = self._interface(interface)
        if self._launch.rank == 0:
            self._start = self._store.add("asyncrl/starts", 1)
        else:
            knock = uuid.uuid4().hex
            self._store.set(f"asyncrl/knock/{self._launch.rank}", knock)
            welcome = f"asyncrl/welcome/{knock}"
            if not await self._until(lambda: self._store.check([welcome]), stop, PREPARE_S, "rank 0 has not begun"):
                return None
            self._start = int(self._store.get(welcome))
        self._store.set(self._key("beat", self._launch.rank), "0")
        self._store.set(self._key("here", self._launch.rank), msgspec.json.encode(found[1]).decode())
        done = self._all_here if self._launch.rank == 0 else lambda: self._store.check([self._key("met")])
        if not await self._until(done, stop, MEET_S, "not all learner ranks have come"):
            return None
        self._here = self._gathered() if self._launch.rank == 0 else self._told_where()
        self._beats = await asyncio.to_thread(connected, self._launch)
        self._beating.start()
        store = PrefixStore(f"asyncrl/{self._start}/group", await asyncio.to_thread(connected, self._launch))
        return Meeting(store, found[0], gpu=self._launch.local_rank, neighbours=self._launch.local_size)

    def on_stop(self, loop: AbstractEventLoop, stop: asyncio.Event) -> None:
        """As rank 0: set `stop` when another rank is asked to stop."""

        def told() -> None:
            loop.call_soon_threadsafe(stop.set)

        self._told = told

    def ask_to_stop(self) -> None:
        """As another rank: have rank 0 stop."""
        self._stopping.set()

    def complain(self, message: str) -> None:
        """Tell the others what this rank fails of. A store that is gone is told nothing."""
        try:
            said = msgspec.json.encode(Failed(self._launch.rank, message)).decode()
            self._store.append(self._key("failed"), said + "\n")  # type: ignore[attr-defined]  # not in its stub
        except RuntimeError:
            return

    def check(self) -> None:
        """Raises RankLost if another rank has failed or is silent."""
        if lost := self._lost(SILENT_S):
            raise RankLost(lost)

    async def cause(self, error: Exception) -> Exception:
        """RankLost if `error` comes from another rank that failed or does not answer, else `error`."""
        if isinstance(error, RankLost) or not may_be_of_a_collective(error) or not self._here:
            return error
        self._listening.set()
        deadline = time.monotonic() + LOST_S + 5 * BEAT_S
        while not (lost := self._lost(LOST_S)) and time.monotonic() < deadline:
            await asyncio.to_thread(self._over.wait, LOOK_S)
        if lost:
            return RankLost(lost)
        if "Timed out" in str(error):  # Gloo's words; it does not say whom it waited for
            others = ", ".join(self._name(rank) for rank in self._others)
            return RankLost(f"no answer within run.no_progress_s, {self._limit_s:.0f} s, of one of {others}")
        return error

    def close(self) -> None:
        """Beat no longer."""
        self._over.set()
        if self._beating.is_alive():
            self._beating.join(2 * BEAT_S)

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self._launch.size) if rank != self._launch.rank]

    def _key(self, what: str, rank: int | None = None) -> str:
        return f"asyncrl/{self._start}/{what}" + ("" if rank is None else f"/{rank}")

    def _name(self, rank: int) -> str:
        at = self._here[rank]
        return f"learner rank {rank} (process {at.pid} on {at.host})"

    def _interface(self, wanted: str | None) -> tuple[str, Here]:
        """By which this rank is reached, and where it is."""
        from asyncrl.learners.parallel import loopback
        from asyncrl.weights.base import WeightsError
        from asyncrl.weights.meeting import own_address

        wanted = os.environ.get("GLOO_SOCKET_IFNAME") or wanted
        if wanted is None and self._launch.one_host:
            wanted = loopback()
        try:
            address = own_address(wanted, self._launch.address)
        except WeightsError as error:
            raise LaunchError(str(error)) from error
        return wanted or interface_of(address), Here(socket.gethostname(), os.getpid(), address)

    async def _until(self, done: Callable[[], bool], stop: asyncio.Event, limit_s: float, otherwise: str) -> bool:
        """Ask `done` until it says so; False when `stop` is set. `otherwise`: what is said after `limit_s` seconds."""
        started = time.monotonic()
        while not await asyncio.to_thread(done):
            if self._start and (failed := await asyncio.to_thread(self._complaints, self._store)):
                raise RankLost(f"learner rank {failed[0].rank} failed: {failed[0].message}")
            if time.monotonic() - started > limit_s:
                missing = "" if not self._start else f"; missing: {', '.join(map(str, self._missing()))}"
                raise RankLost(f"{otherwise} within {limit_s:.0f} s{missing}")
            try:
                await asyncio.wait_for(stop.wait(), LOOK_S)
            except TimeoutError:
                continue
            return False
        return True

    def _missing(self) -> list[int]:
        return [rank for rank in self._others if not self._store.check([self._key("here", rank)])]

    def _all_here(self) -> bool:
        """As rank 0: welcome who has knocked since; whether all are here. One that knocked for an earlier start is
        welcomed too, and nobody reads it; its successor knocks with another number."""
        missing = self._missing()
        for rank in missing:
            key = f"asyncrl/knock/{rank}"
            if self._store.check([key]) and (knock := self._store.get(key)) != self._welcomed.get(rank):
                self._store.set(f"asyncrl/welcome/{knock.decode()}", str(self._start))
                self._welcomed[rank] = knock
        return not missing

    def _gathered(self) -> list[Here]:
        """As rank 0, once all are here: where; the others may go on."""
        keys = [self._key("here", rank) for rank in range(self._launch.size)]
        here = [msgspec.json.decode(value, type=Here) for value in self._store.multi_get(keys)]
        check_reach(here)
        self._store.set(self._key("met"), msgspec.json.encode(here).decode())
        return here

    def _told_where(self) -> list[Here]:
        return msgspec.json.decode(self._store.get(self._key("met")), type=list[Here])

    def _lost(self, silent_s: float) -> str:
        """Who has failed or been silent for so long, the first of them; "" if nobody."""
        with self._lock:
            if self._failed:
                return f"{self._name(self._failed[0].rank)} failed: {self._failed[0].message}"
            now = time.monotonic()
            ages = {rank: now - at for rank, (_, at) in self._heard.items()}
            if self._gone or now - self._answered > silent_s:
                at = f"{self._launch.address}, port {self._launch.port}"
                return f"torchrun's store at {at} is gone: {self._gone or 'it does not answer'}"
        rank = max(ages, key=lambda rank: ages[rank], default=None)
        if rank is None or ages[rank] < silent_s:
            return ""
        return f"{self._name(rank)} was killed or does not answer: not heard of for {ages[rank]:.0f} s"

    def _beat(self) -> None:
        """The thread: say that this process lives, and hear of the others; rank 0 always, another once it asks."""
        count, stopping, store = 0, False, self._beats
        while not self._over.wait(BEAT_S):
            count += 1
            try:
                store.set(self._key("beat", self._launch.rank), str(count))
                if self._stopping.is_set() and not stopping:
                    store.set(self._key("stop"), "")
                    stopping = True
                if self._launch.rank == 0 or self._listening.is_set():
                    self._hear(store)
                with self._lock:
                    self._answered = time.monotonic()
            except RuntimeError as error:
                with self._lock:
                    self._gone = str(error).splitlines()[0]
                return

    def _hear(self, store: TCPStore) -> None:
        beats = store.multi_get([self._key("beat", rank) for rank in self._others])
        failed = self._complaints(store)
        if self._launch.rank == 0 and store.check([self._key("stop")]):
            self._told()
        now = time.monotonic()
        with self._lock:
            self._failed = failed
            for rank, beat in zip(self._others, beats, strict=True):
                if self._heard.get(rank, (b"", 0.0))[0] != beat:
                    self._heard[rank] = (beat, now)

    def _complaints(self, store: TCPStore) -> list[Failed]:
        """Of other ranks, in their order."""
        key = self._key("failed")
        lines = store.get(key).decode().splitlines() if store.check([key]) else []
        found = [msgspec.json.decode(line, type=Failed) for line in lines]
        return [one for one in found if one.rank != self._launch.rank]


def check_reach(here: list[Here]) -> None:
    """Raises LaunchError if ranks of several hosts would be reached by an address that only their own host reaches."""
    if len({at.host for at in here}) == 1:
        return
    for rank, at in enumerate(here):
        if at.address.startswith("127.") or at.address == "::1":
            raise LaunchError(
                f"learner rank {rank} on {at.host} would be reached at {at.address}, by nobody on another host.\n"
                "Its name stands for that in /etc/hosts: set weights.interface to the network between the hosts"
            )


def interface_of(address: str) -> str:
    """The name of this host's network interface that has this address. Raises LaunchError.

    >>> interface_of("127.0.0.1") in ("lo", "lo0")
    True
    """
    for name, addresses in psutil.net_if_addrs().items():  # type: ignore[no-untyped-call]
        if any(str(entry.address).partition("%")[0] == address for entry in addresses):
            return str(name)
    raise LaunchError(f"no network interface of this host has the address {address}: set weights.interface")
