"""Transport `shm`: a collector on the learner's host reads the image where the learner wrote it (`image.py`).

Nobody waits for anybody: a reader's lock makes the learner write its next version elsewhere, the header says whether
the segment still holds what was announced, and the checksums find all else: a flipped bit, a wrong offset, a store the
CPU made visible late.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from asyncrl.staleness import Weights
from asyncrl.weights.base import StagedWeights, WeightsError, WeightsGone, WeightsLate
from asyncrl.weights.image import DATA_START, HEADER, Image
from asyncrl.weights.manifest import (
    DTYPES,
    FORMAT,
    Manifest,
    TensorSpec,
    check,
    compare,
    describe,
    tensor_bytes,
)
from asyncrl.weights.segments import MAGIC, read_lock


class ShmOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What a receiver needs to find and check one version."""

    transport: str = "shm"
    host: str
    path: str
    sequence: int  # of the segment while it holds this version
    lineage: int
    version: int
    manifest: Manifest

    @property
    def weights(self) -> Weights:
        return Weights(self.lineage, self.version)

    @property
    def header(self) -> bytes:
        return HEADER.pack(MAGIC, FORMAT, self.sequence, self.lineage, self.version)

    def __str__(self) -> str:
        return f"weights {tuple(self.weights)} in {self.path}"


def shm_offer(image: Image) -> dict[str, Any]:
    """The offer of `image` over this transport, JSON-able."""
    offer = ShmOffer(
        host=socket.gethostname(),
        path=str(image.path),
        sequence=image.sequence,
        lineage=image.weights.lineage,
        version=image.weights.version,
        manifest=image.manifest,
    )
    result: dict[str, Any] = msgspec.to_builtins(offer)
    return result


class ShmReceiver:
    """The collector's side. Holds nothing between calls."""

    def stage(self, offer: Mapping[str, Any], *, deadline_s: float, verify: bool = True) -> StagedWeights:
        """Copy one version out and verify it. Waits for nobody; `deadline_s` bounds the copy itself.

        Raises WeightsGone (overwritten or removed: take the newest announcement), WeightsLate or WeightsError (anything
        else, naming the tensor, expected and found).
        """
        expected = parse(offer)
        verify = verify and expected.manifest.checksum != ""
        fd, lock = _open(expected)
        try:
            check_header(fd, expected)
            tensors, found = _copy(fd, expected, deadline_s, hashed=verify)
            # After the copy and before the checksums: a mixture of two versions is `gone`, not `corrupt`.
            check_header(fd, expected)
        finally:
            os.close(fd)
            os.close(lock)
        if verify:
            compare(expected.manifest, found, where=str(expected))
        return StagedWeights(expected.weights, tensors, expected.manifest.tied, expected.manifest.checksum)

    def close(self) -> None:
        """Nothing is held between calls."""


def parse(offer: Mapping[str, Any]) -> ShmOffer:
    """The announced offer, checked in itself. Raises WeightsError."""
    try:
        parsed = msgspec.convert(dict(offer), ShmOffer)
    except msgspec.ValidationError as error:
        raise WeightsError(f"this is no offer of transport shm: {error}") from error
    if parsed.transport != "shm":
        raise WeightsError(f"this is no offer of transport shm, but of {parsed.transport!r}")
    check(parsed.manifest, str(parsed))
    return parsed


def check_header(fd: int, expected: ShmOffer) -> None:
    """The reader's half of the seqlock: the segment holds exactly this version, completely written."""
    header = os.pread(fd, HEADER.size, 0)
    if header == expected.header:
        return
    if header[:12] != expected.header[:12]:
        raise WeightsError(f"{expected}: no segment of format {FORMAT}, it starts with {header[:12]!r}")
    raise WeightsGone(f"{expected}: the segment holds, or gets, another version by now")


def _open(expected: ShmOffer) -> tuple[int, int]:
    """The segment, and the lock that keeps it from being overwritten until that is closed."""
    try:
        fd = os.open(expected.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        lock = read_lock(Path(expected.path))
    except FileNotFoundError as error:
        if expected.host == socket.gethostname():
            raise WeightsGone(f"{expected}: the file has been removed") from error
        raise WeightsError(
            f"{expected} are on host {expected.host}; this collector runs on {socket.gethostname()}: "
            "transport shm needs learner and collectors on one host"
        ) from error
    except OSError as error:
        raise WeightsError(f"{expected}: {error.strerror}; learner and collectors must run as the same user") from error
    if lock is None:
        os.close(fd)
        raise WeightsGone(f"{expected}: the segment gets another version just now")
    return fd, lock


def _copy(
    fd: int, expected: ShmOffer, deadline_s: float, *, hashed: bool
) -> tuple[dict[str, torch.Tensor], list[TensorSpec]]:
    """Private copies of all tensors, and what they turned out to be."""
    deadline = time.monotonic() + deadline_s
    tensors: dict[str, torch.Tensor] = {}
    found: list[TensorSpec] = []
    for spec in expected.manifest.tensors:
        if time.monotonic() >= deadline:
            raise WeightsLate(
                f"{expected}: {len(found)} of {len(expected.manifest.tensors)} tensors copied within {deadline_s} s, "
                f"{spec.name} is next. Raise weights.deadline_s, or see what else uses this machine's memory"
            )
        tensor = torch.empty(spec.shape, dtype=DTYPES[spec.dtype])
        content = tensor_bytes(spec.name, tensor)  # contiguous and on the CPU: the tensor's own memory
        _read(fd, content, DATA_START + spec.offset, expected, spec.name)
        found.append(describe(spec.name, tensor, content, offset=spec.offset, hashed=hashed))
        tensors[spec.name] = tensor
    return tensors, found


def _read(fd: int, into: memoryview, offset: int, expected: ShmOffer, name: str) -> None:
    with open(fd, "rb", buffering=0, closefd=False) as file:
        file.seek(offset)
        while into:  # one call reads 2 GiB at most
            count = file.readinto(into)
            if not count:
                raise WeightsError(f"{expected}: the file ends {len(into)} bytes before the end of {name}")
            into = into[count:]
