"""Weights published from shards, by real ranks: `python gathered.py RANK SIZE FOLDER`.

FOLDER holds model/ and gets `meeting`; from each rank `peaks-RANK`, bytes of buffers for each of SIZES, and from rank 0
`manifests.json`.
"""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import Any

import msgspec
import torch

from asyncrl.learners import gathering
from asyncrl.learners.gathering import merged
from asyncrl.learners.lora import in_dtype, served_weights
from asyncrl.learners.model import load_model
from asyncrl.learners.parallel import ALONE, Ranks, Sharded, in_folder
from asyncrl.staleness import Weights
from asyncrl.weights.image import Images
from asyncrl.weights.manifest import Manifest

DTYPE = "bfloat16"
LIMIT_S = 60.0
SIZES = (300, 1 << 30)
"""Of buckets: less than the largest tensor and no multiple of a row; room for everything."""


def trained(ranks: Ranks, folder: Path) -> tuple[Any, Any]:
    """The model after something like a step, and the whole one, which knows nothing of it on several ranks."""
    model = load_model(folder / "model", DTYPE, "auto")
    model.register_buffer("calls", torch.tensor([3]))
    whole = ranks.shard(model)
    with torch.no_grad():
        for parameter in model.parameters():
            ranks.own(parameter).mul_(1.37)
    return model, whole


def published(source: Any, tied: dict[str, str], folder: Path) -> Manifest:
    images = Images("gathered", folder=folder)
    try:
        return images.write(Weights(1, 0), source, tied=tied).manifest
    finally:
        images.close()


def alone(folder: Path) -> Manifest:
    """As one rank publishes it."""
    _, whole = trained(ALONE, folder)
    served = served_weights(whole)
    return published(in_dtype(served, DTYPE), served.tied, folder)


class Count:
    """Bytes of all buffers that are alive at once."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        self.make = gathering.buffer
        gathering.buffer = self.counted

    def counted(self, *arguments: Any) -> torch.Tensor:
        buffer = self.make(*arguments)
        self.live += buffer.nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(buffer, self.freed, buffer.nbytes)
        return buffer

    def freed(self, size: int) -> None:
        self.live -= size


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    ranks = Sharded(rank, size, meeting=in_folder(folder / "meeting", rank, size), step_s=LIMIT_S, silence_s=LIMIT_S)
    model, whole = trained(ranks, folder)
    count = Count()
    manifests, peaks = [], []
    for gathering.BUCKET_BYTES in SIZES:
        count.peak = 0
        if rank == 0:
            served = served_weights(whole)
            source = merged(served, ranks.stream(model, getattr(torch, DTYPE)), DTYPE)
            manifests.append(published(source, served.tied, folder))
        else:
            ranks.give(model, getattr(torch, DTYPE))
        peaks.append(count.peak)
    if rank == 0:
        (folder / "manifests.json").write_bytes(msgspec.json.encode(manifests))
    (folder / f"peaks-{rank}").write_bytes(msgspec.json.encode(peaks))
    ranks.close()


if __name__ == "__main__":
    main()
