"""How long a version takes from the learner's tensors to a verified copy in another process, against one memcpy.

The limit is a copy of the same bytes into memory that exists, by one thread. Learner and reader use as many as there
are cores for it, up to four; each row also has the share of a copy by as many.
Rows: with and without checksums; with a reader that serves where the learner wrote and one that copies. All turns of
all rows are interleaved.

Control: the same through `torch.save` and `torch.load` in the same folder must miss what a copying reader has to reach.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.staleness import Weights
from asyncrl.weights.copying import Copier
from asyncrl.weights.image import Images
from asyncrl.weights.manifest import combined_checksum
from asyncrl.weights.segments import segment_folder
from asyncrl.weights.shm import ShmReceiver, shm_offer

SIZES_GB, QUICK_SIZES_GB = (0.5, 2.0), (0.1,)
TURNS, QUICK_TURNS, CONTROL_TURNS = 7, 5, 3

OF_MEMCPY = {("mapped", True): 0.6, ("mapped", False): 0.9, ("copied", True): 0.3, ("copied", False): 0.45}
"""(reader, with checksums) -> share of the memcpy's rate that publishing and verifying must reach."""

LAYER = (*[2 << 20] * 4, *[6 << 20] * 3, 2 << 10, 2 << 10)  # elements: attention, feed-forward, two norms
LIMIT_S = 120.0  # for one answer of the reader

Tensors = list[tuple[str, torch.Tensor]]


def measure(*, quick: bool, say: Say) -> Measured:
    """A row per size, reader and hashing; the control at the smallest size. Needs 12 GB of memory, 3 in quick."""
    rows: list[Row] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the memcpy
    try:
        for size in QUICK_SIZES_GB if quick else SIZES_GB:
            flat = _random(int(size * 1e9))
            rows += compared(flat, turns=QUICK_TURNS if quick else TURNS, say=say)
            if len(rows) == len(OF_MEMCPY):
                rows.append(control(flat, turns=CONTROL_TURNS, say=say))
    finally:
        torch.set_num_threads(threads)
    return Measured(rows, targets(rows))


def targets(rows: list[Row]) -> list[Target]:
    """Each row against its share; the control against the lowest."""
    found = []
    for row in rows:
        if row["kind"] == "shm":
            name = f"shm, {row['gb']:g} GB, {row['reader']}, {'hashed' if row['hashed'] else 'unhashed'}: of a memcpy"
            share = OF_MEMCPY[row["reader"], row["hashed"]]
            found.append(Target(name, row["of_memcpy"], share, "higher"))
        else:
            name = f"control: {row['gb']:g} GB by torch.save and torch.load: of a memcpy"
            found.append(Target(name, row["of_memcpy"], OF_MEMCPY["copied", True], "lower"))
    return found


def compared(flat: torch.Tensor, *, turns: int, say: Say) -> list[Row]:
    """Publish and stage the bytes of `flat`, uint8 [n], in turns with a copy of them."""
    tensors, target = model_of(flat), np.ones(flat.numel(), np.uint8)
    times: dict[tuple[str, bool], list[tuple[float, float]]] = {kind: [] for kind in OF_MEMCPY}
    copies: list[float] = []
    together: list[float] = []
    images, copier = Images("bench-weights"), Copier()
    try:
        with reading("mapped") as mapped, reading("copied") as copied:
            readers, version = {"mapped": mapped, "copied": copied}, 0
            for turn in range(turns + 2):  # in the first two, memory is given out
                copy_s = _timed(lambda: np.copyto(target, flat.numpy()))
                together_s = _timed(lambda: _copied_by_all(copier, target, flat.numpy()))
                for (reader, hashed), found in times.items():
                    version += 1
                    began = time.perf_counter()
                    image = images.write(Weights(1, version), tensors, tied={}, hashed=hashed)
                    published = time.perf_counter()
                    readers[reader](image)
                    if turn >= 2:
                        found.append((published - began, time.perf_counter() - published))
                if turn >= 2:
                    copies.append(copy_s)
                    together.append(together_s)
    finally:
        images.close()
        copier.close()
    rows = [_row("shm", flat, copies, found, say, reader=r, hashed=hashed) for (r, hashed), found in times.items()]
    for row in rows:
        together_ms = 1e3 * median(together)
        share = row["of_memcpy"] * together_ms / row["memcpy_ms"]
        row.update({"threads": copier.workers, "memcpy_by_threads_ms": together_ms, "of_memcpy_by_threads": share})
    return rows


def control(flat: torch.Tensor, *, turns: int, say: Say) -> Row:
    """The same, as it is written in an afternoon."""
    tensors, target = dict(model_of(flat)), np.ones(flat.numel(), np.uint8)
    copies: list[float] = []
    found: list[tuple[float, float]] = []
    with TemporaryDirectory(prefix="asyncrl-bench-", dir=segment_folder()) as folder:
        path = Path(folder) / "weights.pt"
        for _ in range(turns):
            copies.append(_timed(lambda: np.copyto(target, flat.numpy())))
            began = time.perf_counter()
            expected = combined_checksum(tensors.items())
            torch.save(tensors, path)
            saved = time.perf_counter()
            if combined_checksum(torch.load(path).items()) != expected:
                raise RuntimeError("torch.load brought other bytes than torch.save was given")
            found.append((saved - began, time.perf_counter() - saved))
    return _row("control", flat, copies, found, say, reader="torch.load", hashed=True)


@contextmanager
def reading(reader: str) -> Iterator[Callable[[object], None]]:
    """A process that stages what it is told to; the function returns when it has."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_stage, args=(there, reader == "mapped"), daemon=True)
    process.start()
    there.close()

    def stage(image: object) -> None:
        here.send(shm_offer(image))  # type: ignore[arg-type]
        if not here.poll(LIMIT_S):
            raise TimeoutError(f"the reader has not answered within {LIMIT_S:.0f} s")
        if error := here.recv():
            raise RuntimeError(f"the reader: {error}")

    try:
        yield stage
    finally:
        here.close()  # it ends at the end of its input
        process.join(LIMIT_S)


def _stage(offers: Connection, mapped: bool) -> None:
    torch.set_num_threads(1)
    receiver = ShmReceiver(mapped=mapped)
    while True:
        try:
            offer = offers.recv()
        except EOFError:
            return
        try:
            receiver.stage(offer, deadline_s=LIMIT_S)
        except Exception as error:
            offers.send(f"{type(error).__name__}: {error}")
        else:
            offers.send("")


def model_of(flat: torch.Tensor) -> Tensors:
    """bfloat16 tensors of a decoder's sizes over uint8 [n]: an eighth is one embedding, the rest layers."""
    elements = flat.view(torch.bfloat16)
    sizes = [len(elements) // 8]
    while (left := len(elements) - sum(sizes)) > 0:
        sizes.append(min(LAYER[(len(sizes) - 1) % len(LAYER)], left))
    return [(f"model.{at}.weight", tensor) for at, tensor in enumerate(torch.split(elements, sizes))]


def _random(size: int) -> torch.Tensor:
    """uint8 [about size]: a block of random bytes over and over."""
    block = torch.randint(256, (min(size, 1 << 26),), dtype=torch.uint8)
    return block.repeat(-(-size // len(block)))


def _copied_by_all(copier: Copier, into: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
    shares = zip(np.array_split(into, copier.workers), np.array_split(source, copier.workers), strict=True)
    for copying in [copier.begin(to, of, hashed=False) for to, of in shares]:
        copying.result()


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _row(
    kind: str,
    flat: torch.Tensor,
    copies: list[float],
    found: list[tuple[float, float]],
    say: Say,
    *,
    reader: str,
    hashed: bool,
) -> Row:
    copy_s, publish_s, stage_s = median(copies), median(p for p, _ in found), median(s for _, s in found)
    row: Row = {
        "kind": kind,
        "gb": round(flat.numel() / 1e9, 3),
        "tensors": len(model_of(flat)),
        "reader": reader,
        "hashed": hashed,
        "turns": len(found),
        "memcpy_ms": 1e3 * copy_s,
        "publish_ms": 1e3 * publish_s,
        "stage_ms": 1e3 * stage_s,
        "of_memcpy": copy_s / median(p + s for p, s in found),
    }
    say(
        f"{kind} {row['gb']:g} GB, {reader}, {'hashed' if hashed else 'unhashed'}: publish {row['publish_ms']:.0f} ms, "
        f"stage {row['stage_ms']:.0f} ms, memcpy {row['memcpy_ms']:.0f} ms: {row['of_memcpy']:.2f} of it"
    )
    return row
