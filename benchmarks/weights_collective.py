"""Part of `weights`: how long until two other processes have a version, against a bare broadcast of the same bytes.

The limit is `torch.distributed.broadcast` of one piece of memory to the same two processes. Rows: from the learner's
tensors to verified copies (written as an image, broadcast, hashed on both sides); and from an image that exists,
without checksums. The times hold all that a transfer needs: offer, knocks, roster, reports. All turns are interleaved.

Control: the tensors pickled through a pipe to each process, and hashed, must miss what `hashed` has to reach.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
from torch import distributed as dist

from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.benchmarks.weights_shm import model_of
from asyncrl.learners.parallel import loopback
from asyncrl.staleness import Weights
from asyncrl.weights.base import Recipient
from asyncrl.weights.collective import CollectiveSender
from asyncrl.weights.collective_receiver import CollectiveReceiver
from asyncrl.weights.image import Images
from asyncrl.weights.manifest import combined_checksum

SIZE_MB, QUICK_SIZE_MB = 256, 64
TURNS, QUICK_TURNS = 9, 5
MEMBERS = ("a", "b")

OF_BARE = {"hashed": 0.7, "prepacked": 0.9}
"""row -> share of the bare broadcast's rate that it must reach."""

LIMIT_S = 60.0  # for one answer of a member


def measure(*, quick: bool, say: Say) -> Measured:
    """A row for each of OF_BARE, and the control."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        size, turns = (QUICK_SIZE_MB, QUICK_TURNS) if quick else (SIZE_MB, TURNS)
        rows = compared(size * 1_000_000, turns=turns)
    finally:
        torch.set_num_threads(threads)
    for row in rows:
        say(
            f"collective {row['mb']:g} MB to {len(MEMBERS)}, {row['way']}: {row['ms']:.0f} ms, "
            f"bare broadcast {row['bare_ms']:.0f} ms: {row['of_bare']:.2f} of it"
        )
    return Measured(rows, targets(rows))


def targets(rows: list[Row]) -> list[Target]:
    """Each row against its share; the control against the lowest."""
    return [
        Target(f"control: {row['mb']:g} MB pickled: of a bare broadcast", row["of_bare"], OF_BARE["hashed"], "lower")
        if row["kind"] == "control"
        else Target(
            f"collective, {row['mb']:g} MB, {row['way']}: of a bare broadcast",
            row["of_bare"],
            OF_BARE[row["way"]],
            "higher",
        )
        for row in rows
    ]


def compared(size: int, *, turns: int) -> list[Row]:
    """All ways in turns, after two turns in which connections are made and memory is given out."""
    flat = torch.randint(256, (size // 2 * 2,), dtype=torch.uint8)
    tensors = model_of(flat)
    times: dict[str, list[float]] = {way: [] for way in ("bare", "hashed", "prepacked", "pickled")}
    images = Images("bench-weights")
    sender = CollectiveSender(deadline_s=LIMIT_S, toward="127.0.0.1")
    version = 0

    def transfer(image: Any, verify: bool) -> None:
        sender.serve(image, [Recipient(name, name, None, "collective", None) for name in MEMBERS])
        limit = time.monotonic() + LIMIT_S
        while (offer := sender.offer()) is None or offer["version"] != image.weights.version:
            if time.monotonic() > limit:
                raise TimeoutError(f"the sender has not offered {tuple(image.weights)} within {LIMIT_S:g} s")
            time.sleep(1e-4)
        everyone("stage", offer, verify)

    try:
        with members(flat) as everyone:
            for turn in range(turns + 2):
                version += 2
                began = time.perf_counter()
                everyone("bare", flat)
                bare = time.perf_counter()
                transfer(images.write(Weights(1, version - 1), tensors, tied={}), True)
                hashed = time.perf_counter()
                image = images.write(Weights(1, version), tensors, tied={}, hashed=False)
                written = time.perf_counter()
                transfer(image, False)
                prepacked = time.perf_counter()
                everyone("pickled", tensors)
                if turn >= 2:
                    times["bare"].append(bare - began)
                    times["hashed"].append(hashed - bare)
                    times["prepacked"].append(prepacked - written)
                    times["pickled"].append(time.perf_counter() - prepacked)
    finally:
        sender.close()
        images.close()
    bare_s = median(times.pop("bare"))
    return [
        {
            "kind": "control" if way == "pickled" else "collective",
            "way": way,
            "mb": flat.numel() / 1e6,
            "members": len(MEMBERS),
            "turns": len(found),
            "bare_ms": 1e3 * bare_s,
            "ms": 1e3 * median(found),
            "of_bare": bare_s / median(found),
        }
        for way, found in times.items()
    ]


@contextmanager
def members(flat: torch.Tensor) -> Iterator[Callable[..., None]]:
    """The other processes, in one group with this one; the function tells them what to do, and returns when all have
    done it."""
    context = get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pipes, processes = [], []
    for rank, name in enumerate(MEMBERS, start=1):
        here, there = context.Pipe()
        process = context.Process(target=_member, args=(there, name, rank, port, flat.numel()), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)

    def everyone(what: str, payload: Any, verify: bool = False) -> None:
        for pipe in pipes:
            pipe.send((what, payload if what == "stage" else None, verify))
        if what == "bare":
            dist.broadcast(payload, 0)
        if what == "pickled":
            combined_checksum(payload)
            for pipe in pipes:
                for _, tensor in payload:
                    pipe.send(tensor.view(torch.uint8).numpy())
        for pipe in pipes:
            if not pipe.poll(LIMIT_S):
                raise TimeoutError(f"a member has not answered within {LIMIT_S:.0f} s")
            if error := pipe.recv():
                raise RuntimeError(f"a member: {error}")

    _join(0, port)
    try:
        yield everyone
    finally:
        dist.destroy_process_group()
        for pipe in pipes:
            pipe.close()  # they end at the end of their input
        for process in processes:
            process.join(LIMIT_S)


def _join(rank: int, port: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=len(MEMBERS) + 1,
        timeout=timedelta(seconds=LIMIT_S),
    )


def _member(commands: Connection, name: str, rank: int, port: int, size: int) -> None:
    torch.set_num_threads(1)
    _join(rank, port)
    receiver, memory = CollectiveReceiver(name), torch.zeros(size, dtype=torch.uint8)
    try:
        while True:
            try:
                what, offer, verify = commands.recv()
            except EOFError:
                return
            try:
                if what == "bare":
                    dist.broadcast(memory, 0)
                elif what == "stage":
                    receiver.stage(offer, deadline_s=LIMIT_S, verify=verify)
                else:
                    found, left = [], size
                    while left:
                        found.append(("", torch.from_numpy(commands.recv())))
                        left -= found[-1][1].nbytes
                    combined_checksum(found)
            except Exception as error:
                commands.send(f"{type(error).__name__}: {error}")
            else:
                commands.send("")
    finally:
        receiver.close()
        dist.destroy_process_group()
