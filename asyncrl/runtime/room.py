"""The memory that this machine has: of the host, within the limits of a container, in /dev/shm and on GPUs. No torch in
this process."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from asyncrl.config.sizes import size_about
from asyncrl.weights.segments import segment_folder

CGROUPS = Path("/sys/fs/cgroup")
GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""One of them is there where a GPU may be: NVIDIA, under WSL, AMD."""

LOOK_S = 60.0
"""For a process that loads torch and asks it."""

_ASK = (
    "import json, torch\n"
    "ids = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)\n"
    "print(json.dumps([torch.cuda.mem_get_info(i) for i in ids]))"
)


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of one memory. total: all that it has, swap included; free: what can be had of it now, without swap."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Machine:
    """shared: None where files of shared memory are no file system of their own. gpus: those that torch can use."""

    host: Room
    shared: Room | None
    gpus: tuple[Room, ...] = ()

    def __str__(self) -> str:
        """For people: 2 GPUs of 80.0 GiB and 512.0 GiB of memory."""
        sizes = Counter(size_about(gpu.total) for gpu in self.gpus)
        counted = [f"{count} GPU{'s' if count > 1 else ''} of {size}" for size, count in sizes.items()]
        return " and ".join([*(counted or ["no GPU"]), f"{size_about(self.host.total)} of memory"])


def other(memory: int, gpus: Sequence[int]) -> Machine:
    """A machine that is not this one, with nothing else on it, in bytes. /dev/shm has half of the memory, as Linux
    gives it; a container may be given less."""
    rooms = [Room(size, size) for size in (memory, memory // 2, *gpus)]
    return Machine(rooms[0], rooms[1], tuple(rooms[2:]))


async def machine() -> Machine:
    """What there is. Asks for GPUs only where a driver is."""
    return Machine(host(), shared(), await gpus() if any(map(os.path.exists, GPU_FILES)) else ())


def host(cgroups: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> Room:
    """Of the machine, or of the smallest control group that this process is in."""
    memory = psutil.virtual_memory()  # type: ignore[no-untyped-call]
    limit = min([memory.total, *_limits(cgroups, own)])
    swap = psutil.swap_memory().total  # type: ignore[no-untyped-call]
    return Room(total=limit + swap, free=min(memory.available, limit))


def shared() -> Room | None:
    """Of the folder that weights are written to."""
    folder = segment_folder()
    if folder != Path("/dev/shm"):
        return None
    usage = shutil.disk_usage(folder)
    return Room(usage.total, usage.free)


async def gpus() -> tuple[Room, ...]:
    """Asked of torch in a process of its own: whether it can use them depends on its build and on the environment. None
    if it does not answer in time; then what is planned is not compared with any."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-c",
        _ASK,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(LOOK_S):
            said, _ = await process.communicate()
        return tuple(Room(total, free) for free, total in json.loads(said))
    except (TimeoutError, ValueError):
        return ()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _limits(cgroups: Path, own: Path) -> Iterator[int]:
    """memory.max, or its name in version 1, of this process's group and of all above it."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = cgroups / controllers
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # another namespace's path; or "max", which is none
                yield int((folder / name).read_text())
            if folder == root:
                break
