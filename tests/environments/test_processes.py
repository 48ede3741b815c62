"""Processes of episodes: nothing of one is seen by another, and nothing of one is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from asyncrl.environments.processes import CallFailed, Process, Processes, ProcessesLost
from asyncrl.environments.wire import LARGEST_REPLY

pytestmark = pytest.mark.asyncio

LIMIT_S = 20.0  # of each call that should come back at once; no assertion looks at how long it took

TARGET = """
import json, os, random, signal, subprocess, sys, threading, time

LEFT = {"module": "clean"}

class Target:
    def __init__(self, fault=""):
        self.own = "clean"
        if fault == "thread":
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        if fault == "raise":
            raise ValueError("not today")
        if fault == "helper":
            self.helper = subprocess.Popen(["sleep", "1000"])

    def leave_things_behind(self):
        LEFT["module"] = self.own = "used"
        json.dumps = None
        os.environ["LEFT_BEHIND"] = "used"
        os.chdir("/")
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        self.file = open("/dev/null")
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        return True

    def look_around(self):
        return {
            "module": LEFT["module"],
            "object": self.own,
            "other modules": json.dumps is not None,
            "environment": os.environ.get("LEFT_BEHIND", "clean"),
            "folder": os.getcwd() != "/",
            "handler": signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL,
            "threads": threading.active_count(),
            "files": len(os.listdir("/proc/self/fd")),
        }

    def add(self, a, b):
        return a + b

    def draw(self):
        return random.random()

    def pid(self):
        return os.getpid()

    def helper_runs(self):
        return os.path.exists(f"/proc/{self.helper.pid}/stat")

    def fail(self):
        raise ValueError("the reason")

    def leave(self):
        print("good bye")
        os._exit(3)

    def hang(self):
        while True:
            pass

    def shout(self):
        for _ in range(200):
            sys.stdout.write("x" * 50_000)
        return "done"

    def fill_memory(self):
        return len(bytearray(1 << 30))

    def large(self, size):
        return "x" * size

    def odd(self):
        return object()

    def start_others(self):
        found = [subprocess.Popen(["sleep", "1000"], start_new_session=True).pid]
        if os.fork() == 0:  # twice, in a session of its own: nobody's child any more
            os.setsid()
            if os.fork():
                os._exit(0)
            with open("daemon", "w") as file:
                file.write(str(os.getpid()))
            os.rename("daemon", "daemon.pid")
            time.sleep(1000)
        while not os.path.exists("daemon.pid"):
            time.sleep(0.01)
        return [*found, int(open("daemon.pid").read())]

def make(**arguments):
    return Target(**arguments)
"""


@asynccontextmanager
async def making(name: str, **arguments: object) -> AsyncIterator[Processes]:
    memory = arguments.pop("memory_bytes", None)
    processes = Processes(f"{name}:make", arguments, memory_bytes=memory)
    try:
        yield processes
    finally:
        await processes.close()


@asynccontextmanager
async def beginning(processes: Processes, seed: int = 0) -> AsyncIterator[Process]:
    process = await processes.begin(seed)
    try:
        yield process
    finally:
        await process.end()


@pytest.fixture
def target(write_module: Callable[[str, str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return write_module("target_of_processes", TARGET)


@pytest.mark.parametrize("fault", ["", "thread"], ids=["forked", "started anew"])
async def test_nothing_that_an_episode_leaves_behind_is_seen_by_the_next(target: str, fault: str) -> None:
    async with making(target, fault=fault) as processes:
        async with beginning(processes) as process:
            clean = await process.call("look_around", limit_s=LIMIT_S)
        async with beginning(processes) as process:
            assert await process.call("leave_things_behind", limit_s=LIMIT_S)
            # The control: with the process kept for another episode, every one of these would be seen.
            used = await process.call("look_around", limit_s=LIMIT_S)
        async with beginning(processes) as process:
            assert await process.call("look_around", limit_s=LIMIT_S) == clean
    assert {key for key in clean if clean[key] != used[key]} == set(clean)


async def test_a_failed_call_says_why_and_only_a_fatal_one_ends_the_process(target: str) -> None:
    async with making(target) as processes:
        async with beginning(processes) as process:
            assert await process.call("add", 2, 3, limit_s=LIMIT_S) == 5
            for method, arguments, kind, said in (
                ("fail", (), "raised", "ValueError: the reason"),
                ("odd", (), "invalid", "cannot be sent"),
                ("large", (LARGEST_REPLY,), "invalid", "bytes"),
                ("no_such_method", (), "raised", "no_such_method"),
            ):
                with pytest.raises(CallFailed, match=said) as caught:
                    await process.call(method, *arguments, limit_s=LIMIT_S)
                assert caught.value.kind == kind
            assert await process.call("large", 1 << 20, limit_s=LIMIT_S) == "x" * (1 << 20)
            with pytest.raises(CallFailed, match="exit code 3; its last words: good bye") as caught:
                await process.call("leave", limit_s=LIMIT_S)
            assert caught.value.kind == "died"
        async with beginning(processes) as process:
            with pytest.raises(CallFailed, match=r"longer than 0\.2 s") as caught:
                await process.call("hang", limit_s=0.2)
            assert caught.value.kind == "timeout"
            await asyncio.wait_for(process.ended, LIMIT_S)
        async with beginning(processes) as process:
            assert await process.call("add", 1, 1, limit_s=LIMIT_S) == 2


async def test_megabytes_of_print_neither_block_nor_are_kept(target: str) -> None:
    async with making(target) as processes, beginning(processes) as process:
        assert await process.call("shout", limit_s=LIMIT_S) == "done"
        with pytest.raises(CallFailed) as caught:
            await process.call("leave", limit_s=LIMIT_S)
        assert len(str(caught.value)) < 4000


async def test_memory_beyond_the_limit_is_an_error_of_that_call(target: str) -> None:
    async with making(target, memory_bytes=1 << 30) as processes, beginning(processes) as process:
        with pytest.raises(CallFailed, match="MemoryError"):
            await process.call("fill_memory", limit_s=LIMIT_S)
        assert await process.call("add", 1, 2, limit_s=LIMIT_S) == 3
    async with (
        making(target) as processes,
        beginning(processes) as process,
    ):  # the control: without a limit there is room
        assert await process.call("fill_memory", limit_s=LIMIT_S) == 1 << 30


async def test_draws_differ_by_seed_and_by_nothing_else(target: str) -> None:
    async with making(target) as processes:
        drawn = []
        for seed in (1, 2, 1):
            async with beginning(processes, seed) as process:
                drawn.append(await process.call("draw", limit_s=LIMIT_S))
    assert drawn[0] == drawn[2] != drawn[1]


@pytest.mark.parametrize("how", ["ended", "left", "hung"])
async def test_nothing_that_an_episode_started_outlives_it(
    target: str, how: str, is_alive: Callable[[int], bool]
) -> None:
    async with (
        making(target, fault="helper") as processes,
        beginning(processes) as process,
        beginning(processes) as other,
    ):
        pids = await process.call("start_others", limit_s=LIMIT_S)
        assert all(map(is_alive, pids))  # the control: they live as long as the episode does, though abandoned
        if how != "ended":
            with pytest.raises(CallFailed):
                await process.call("leave" if how == "left" else "hang", limit_s=0.2 if how == "hung" else LIMIT_S)
        await process.end()
        assert not any(map(is_alive, pids))
        assert await other.call("helper_runs", limit_s=LIMIT_S)  # started by the import, and everybody's
        assert await other.call("add", 1, 1, limit_s=LIMIT_S) == 2


async def test_many_at_once_answer_each_for_itself(target: str) -> None:
    async def one(processes: Processes, number: int) -> int:
        async with beginning(processes, number) as process:
            return await process.call("add", number, number, limit_s=LIMIT_S)

    async with making(target) as processes:
        assert await asyncio.gather(*(one(processes, n) for n in range(40))) == [2 * n for n in range(40)]
        assert psutil.Process(processes._zygote._process.pid).children(recursive=True) == []


async def test_what_cannot_be_built_is_said_with_its_reason(target: str) -> None:
    async with making(target, fault="raise") as processes:
        with pytest.raises(ProcessesLost, match="ValueError: not today"):
            await processes.start()
    async with making("no_such_module_anywhere") as processes:
        with pytest.raises(ProcessesLost, match="no_such_module_anywhere"):
            await processes.begin(0)


async def test_cancelling_a_call_ends_its_process(target: str) -> None:
    async with making(target) as processes, beginning(processes) as process:
        call = asyncio.ensure_future(process.call("hang", limit_s=LIMIT_S))
        await asyncio.wait({call}, timeout=0.1)
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
        assert await asyncio.wait_for(process.ended, LIMIT_S) == -signal.SIGKILL


@pytest.mark.faults
async def test_processes_that_all_died_at_once_are_lost_and_the_next_one_is_new(target: str) -> None:
    async with making(target) as processes, beginning(processes) as process:
        assert await process.call("add", 1, 1, limit_s=LIMIT_S) == 2
        pids = await process.call("start_others", limit_s=LIMIT_S)
        call = asyncio.ensure_future(process.call("hang", limit_s=LIMIT_S))
        await asyncio.wait({call}, timeout=0.1)
        os.kill(processes._zygote._process.pid, signal.SIGKILL)
        with pytest.raises(ProcessesLost, match="is gone"):
            await call
        for pid in pids:  # orphans of a zygote that was killed: the one thing that is left, and not ours to find
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        async with beginning(processes) as later:
            assert await later.call("add", 1, 1, limit_s=LIMIT_S) == 2


COLLECTOR = """
import asyncio, sys
from asyncrl.environments.processes import Processes

async def main():
    processes = Processes("target_of_processes:make", {})
    process = await processes.begin(0)
    pids = [await process.call("pid", limit_s=20), *await process.call("start_others", limit_s=20)]
    print(*pids, flush=True)
    await process.call("hang", limit_s=1000)

asyncio.run(main())
"""


@pytest.mark.faults
async def test_all_ends_with_the_collector_also_when_it_is_killed(
    target: str,
    tmp_path: Path,
    start: Callable[..., subprocess.Popen[str]],
    is_alive: Callable[[int], bool],
    eventually: Callable[[float, Callable[[], object]], bool],
) -> None:
    collector = start("-c", COLLECTOR, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert collector.stdout is not None
    pids = [int(pid) for pid in collector.stdout.readline().split()]
    assert len(pids) == 3
    assert all(map(is_alive, pids))
    collector.send_signal(signal.SIGKILL)
    assert eventually(30, lambda: not any(map(is_alive, pids)))
