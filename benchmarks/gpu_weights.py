"""New weights between processes on GPUs, against bare copies of the same bytes: `python benchmarks/gpu_weights.py`.

A script, not part of `asyncrl bench`, whose targets are for machines without a GPU. Unattended, minutes at most:

| `step` | `way` | from ... to ... | limit |
|---|---|---|---|
| publish | image | the learner's GPU to an image in shared memory | copying to the host |
| bring | cuda-ipc | the image to the learner's buffer on the GPU | copying from the host |
| stage | shm | the image to another process's tensors on the same GPU | copying from the host |
| stage | cuda-ipc | the learner's buffer to another process's tensors | a copy on the GPU; hashed: and to the host |
| transfer | collective | the image to processes on all other GPUs, over NCCL | a bare NCCL broadcast |

The last needs a second GPU: NCCL refuses two ranks on one. Rows and limits take turns; medians.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from torch import distributed as dist

from asyncrl.benchmarks.frame import Measured, Result, Row, Say, Target, end_script, machine
from asyncrl.benchmarks.weights_shm import model_of
from asyncrl.runtime.folder import versions
from asyncrl.staleness import Weights
from asyncrl.weights.base import Receiver, Recipient, Sender
from asyncrl.weights.collective import CollectiveSender
from asyncrl.weights.collective_receiver import CollectiveReceiver
from asyncrl.weights.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from asyncrl.weights.image import Images
from asyncrl.weights.manifest import combined_checksum
from asyncrl.weights.reach import device_of
from asyncrl.weights.shm import ShmReceiver, shm_offer

TURNS, UNCOUNTED = 7, 2  # in the first ones memory is given out and connections are made
LIMIT_S = 60.0  # for one answer of another process
NO_GPU = 2

LIMITS = {"publish": ["to_host"], "bring": ["from_host"]}
ON_GPU = {True: ["on_gpu", "to_host"], False: ["on_gpu"]}
"""Whether it is hashed -> what taking a version from the learner's buffer needs at least."""

Offer = dict[str, Any]
Ask = Callable[..., str]


@click.command()
@click.option("--gb", default=2.0, show_default=True, help="Of weights, in bfloat16; the GPU needs six times that.")
@click.option("--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write rows and targets to FILE.")
def main(gb: float, file: Path | None) -> None:
    """Measure how new weights reach GPUs."""
    if not torch.cuda.is_available():
        click.echo(f"no GPU that torch {torch.__version__} can use: nothing to measure", err=True)
        sys.exit(NO_GPU)
    measured = measure(gb, say=click.echo)
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    result = Result(
        name="gpu-weights",
        machine={**machine(), "gpus": ", ".join(names)},
        versions=versions(),
        command=" ".join(sys.argv),
        rows=measured.rows,
        targets=measured.targets,
    )
    end_script(result, file)


def measure(gb: float, *, say: Say) -> Measured:
    """All rows that the GPUs of this machine allow; whether what arrived is what was published."""
    elements = int(gb * 1e9) // 2
    flat = torch.randn(elements, dtype=torch.bfloat16, device="cuda:0").view(torch.uint8)
    rows, equal = one_gpu(flat, say)
    if torch.cuda.device_count() > 1:
        more, arrived = all_gpus(flat, say)
        rows, equal = rows + more, equal + arrived
    else:
        say("one GPU: NCCL needs two")
    return Measured(
        rows, [Target("tensors on the GPU are those published, share of ways", sum(equal) / len(equal), 1.0, "higher")]
    )


def one_gpu(flat: torch.Tensor, say: Say) -> tuple[list[Row], list[bool]]:
    """Learner and collector on the first GPU, over shared memory and over cuda-ipc."""
    gpu = torch.device("cuda", 0)
    host, other = torch.empty(flat.shape, dtype=torch.uint8).fill_(1), torch.empty_like(flat)
    limits: dict[str, list[float]] = {"to_host": [], "from_host": [], "on_gpu": []}
    times: dict[tuple[str, str, bool], list[float]] = {}
    changed = threading.Event()
    images = Images("gpu-weights")
    sender = CudaIpcSender(device=device_of(gpu), deadline_s=LIMIT_S, changed=changed.set)
    equal = []
    try:
        with processes([0]) as ask:
            version = 0
            for turn in range(TURNS + UNCOUNTED):
                found = {
                    "to_host": _timed(lambda: host.copy_(flat)),
                    "from_host": _timed(lambda: other.copy_(host)),
                    "on_gpu": _timed(lambda: other.copy_(flat)),
                }
                took: dict[tuple[str, str, bool], float] = {}
                for hashed in (True, False):
                    version += 1
                    began = time.perf_counter()
                    image = images.write(Weights(1, version), model_of(flat), tied={}, hashed=hashed)
                    took["publish", "image", hashed] = time.perf_counter() - began
                    took["stage", "shm", hashed] = _timed(partial(ask, "stage", shm_offer(image)))
                    changed.clear()
                    began = time.perf_counter()
                    sender.serve(image, [Recipient("c", "c", None, "cuda-ipc", None)])
                    offer = _offered(sender, changed)
                    took["bring", "cuda-ipc", hashed] = time.perf_counter() - began
                    took["stage", "cuda-ipc", hashed] = _timed(partial(ask, "stage", offer))
                if turn >= UNCOUNTED:
                    for limit, seconds in found.items():
                        limits[limit].append(seconds)
                    for key, seconds in took.items():
                        times.setdefault(key, []).append(seconds)
            published = combined_checksum(model_of(flat))
            for offer in (shm_offer(image), dict(sender.offer() or {})):
                ask("stage", offer)
                equal.append(ask("checksum") == published)
    finally:
        sender.close()
        images.close()
    rows = []
    for (step, way, hashed), all_seconds in times.items():
        names = LIMITS.get(step) or (LIMITS["bring"] if way == "shm" else ON_GPU[hashed])
        limit_s = sum(median(limits[name]) for name in names)
        rows.append(_row(step, way, hashed, flat, all_seconds, " + ".join(names), limit_s, say))
    return rows, equal


def all_gpus(flat: torch.Tensor, say: Say) -> tuple[list[Row], list[bool]]:
    """The learner on the first GPU, a collector on each other one, over NCCL."""
    others = list(range(1, torch.cuda.device_count()))
    times: dict[str, list[float]] = {"bare": [], "hashed": [], "unhashed": []}
    images = Images("gpu-weights")
    changed = threading.Event()
    gpu = device_of(torch.device("cuda", 0))
    sender = CollectiveSender(deadline_s=LIMIT_S, toward="127.0.0.1", device=gpu, changed=changed.set)
    recipients = [Recipient(name, name, None, "collective", None) for name in map(str, others)]
    try:
        with processes(others) as ask:
            port = _free_port()
            ask("join", (port, len(others) + 1), meanwhile=lambda: _join(0, port, len(others) + 1))
            for turn in range(TURNS + UNCOUNTED):
                took = {"bare": _timed(lambda: ask("bare", flat.numel(), meanwhile=lambda: dist.broadcast(flat, 0)))}
                for hashed in (True, False):
                    weights = Weights(1, 2 * turn + (not hashed))
                    image = images.write(weights, model_of(flat), tied={}, hashed=hashed)
                    changed.clear()
                    began = time.perf_counter()
                    sender.serve(image, recipients)
                    ask("stage", _offered(sender, changed))
                    took["hashed" if hashed else "unhashed"] = time.perf_counter() - began
                if turn >= UNCOUNTED:
                    for key, seconds in took.items():
                        times[key].append(seconds)
            equal = [ask("checksum") == combined_checksum(model_of(flat))]
            ask("leave", meanwhile=dist.destroy_process_group)
    finally:
        sender.close()
        images.close()
    bare = median(times["bare"])
    rows = [
        _row("transfer", "collective", way == "hashed", flat, times[way], "bare broadcast", bare, say)
        for way in ("hashed", "unhashed")
    ]
    return rows, equal


@contextmanager
def processes(indices: list[int]) -> Iterator[Ask]:
    """A collector's process on each of these GPUs. The function tells all of them what to do, does `meanwhile` itself,
    and returns what they answer, which must be the same."""
    context = get_context("spawn")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    with ExitStack() as stack:
        pipes = []
        for rank, index in enumerate(indices, start=1):
            here, there = context.Pipe()
            process = context.Process(target=_collector, args=(there, rank), daemon=True)
            os.environ["CUDA_VISIBLE_DEVICES"] = names[index]  # as it is run: each sees one GPU, its first
            try:
                process.start()
            finally:
                if visible is None:
                    del os.environ["CUDA_VISIBLE_DEVICES"]
                else:
                    os.environ["CUDA_VISIBLE_DEVICES"] = visible
            there.close()
            stack.callback(process.join, LIMIT_S)
            stack.callback(here.close)  # they end at the end of their input
            pipes.append(here)

        def ask(what: str, payload: Any = None, meanwhile: Callable[[], object] = lambda: None) -> str:
            for pipe in pipes:
                pipe.send((what, payload))
            meanwhile()
            answers = set()
            for pipe in pipes:
                if not pipe.poll(LIMIT_S):
                    raise TimeoutError(f"a process has not answered to {what!r} within {LIMIT_S:.0f} s")
                error, answer = pipe.recv()
                if error:
                    raise RuntimeError(f"a process, asked for {what!r}: {error}")
                answers.add(answer)
            if len(answers) != 1:
                raise RuntimeError(f"the processes answer differently to {what!r}: {sorted(answers)}")
            return str(answers.pop())

        yield ask


def _collector(commands: Connection, rank: int) -> None:
    """Do what comes: answers (error, answer)."""
    torch.set_num_threads(1)
    device = torch.device("cuda", 0)
    receivers: dict[str, Receiver] = {
        "shm": ShmReceiver(mapped=True),
        "cuda-ipc": CudaIpcReceiver(),
        "collective": CollectiveReceiver(str(rank), device=device_of(device)),
    }
    served: dict[str, torch.Tensor] = {}
    while True:
        try:
            what, payload = commands.recv()
        except EOFError:
            return
        answer, error = "", ""
        try:
            if what == "stage":
                staged = receivers[payload["transport"]].stage(payload, deadline_s=LIMIT_S)
                served = _on(device, staged.tensors, served)
            elif what == "checksum":
                answer = combined_checksum(served.items())
            elif what == "join":
                _join(rank, *payload)
            elif what == "bare":
                dist.broadcast(torch.empty(payload, dtype=torch.uint8, device=device), 0)
            else:
                dist.destroy_process_group()
            torch.cuda.synchronize()
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        commands.send((error, answer))


def _on(device: torch.device, tensors: Any, old: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As an engine has them: where they lie, if that is on its GPU; else copied over the ones from before."""
    if all(tensor.device == device for tensor in tensors.values()):
        return dict(tensors)
    copies = old or {name: torch.empty_like(tensor, device=device) for name, tensor in tensors.items()}
    for name, copy in copies.items():
        copy.copy_(tensors[name])
    return copies


def _offered(sender: Sender, changed: threading.Event) -> Offer:
    """Its next offer."""
    if not changed.wait(LIMIT_S):
        raise TimeoutError(f"{sender.transport} has offered nothing within {LIMIT_S:.0f} s: see the log")
    return dict(sender.offer() or {})


def _join(rank: int, port: int, size: int) -> None:
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=LIMIT_S),
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def _timed(call: Callable[[], object]) -> float:
    """Seconds, until the GPU is done with it."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _row(
    step: str, way: str, hashed: bool, flat: torch.Tensor, seconds: list[float], limit: str, limit_s: float, say: Say
) -> Row:
    typical = median(seconds)
    row: Row = {
        "kind": "gpu",
        "step": step,
        "way": way,
        "hashed": hashed,
        "gb": flat.numel() / 1e9,
        "turns": len(seconds),
        "ms": 1e3 * typical,
        "limit": limit,
        "limit_ms": 1e3 * limit_s,
        "of_limit": limit_s / typical,
    }
    say(
        f"{step} {way}, {'hashed' if hashed else 'unhashed'}: {row['ms']:.1f} ms, {limit} {row['limit_ms']:.1f} ms: "
        f"{row['of_limit']:.2f} of it"
    )
    return row


if __name__ == "__main__":
    main()
