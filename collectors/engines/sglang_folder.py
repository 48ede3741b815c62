"""Versions as model folders that an SGLang server loads from: shared memory of this host, or a folder both see."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path

import psutil

from asyncrl.weights.base import StagedWeights
from asyncrl.weights.manifest import Manifest, TensorSpec, aligned, describe, tensor_bytes
from asyncrl.weights.shards import INDEX, index, shards

SHARED_MEMORY = Path("/dev/shm")


class Versions:
    """A folder of its own for one engine: a model folder for each version that is about to be loaded."""

    def __init__(self, parent: str | None) -> None:
        """parent: None is this host's shared memory, or where that is not, its temporary folder. What engines of this
        host left behind that were killed is removed."""
        place = Path(parent or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else tempfile.gettempdir())).absolute()
        prefix = f"asyncrl-sglang-{socket.gethostname()}-"
        for left in place.glob(f"{prefix}*"):
            owner = left.name.removeprefix(prefix).partition("-")[0]
            if owner.isdecimal() and not psutil.pid_exists(int(owner)):  # type: ignore[no-untyped-call]
                shutil.rmtree(left, ignore_errors=True)
        self._folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=place))

    def write(self, staged: StagedWeights) -> Path:
        """The model folder of a version, of safetensors files alone. Tied aliases are not in it: the server's loader
        has them follow their source. Blocks."""
        folder = self._folder / f"{staged.weights.lineage}-{staged.weights.version}"
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier try
        folder.mkdir()
        specs: list[TensorSpec] = []
        for name, tensor in staged.tensors.items():
            offset = aligned(specs[-1].offset + specs[-1].nbytes) if specs else 0
            specs.append(describe(name, tensor, offset=offset, checksum=""))
        files = shards(Manifest(tuple(specs), dict(staged.tied), ""), {})
        for file in files:
            with (folder / file.name).open("wb") as stream:
                stream.write(file.header)
                for spec in file.tensors:
                    stream.write(tensor_bytes(spec.name, staged.tensors[spec.name]))
        if len(files) > 1:
            (folder / INDEX).write_bytes(index(files))
        return folder

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self._folder, ignore_errors=True)
