"""Transport `shm`: a collector on the learner's host reads the image where the learner wrote it (`image.py`).

Nobody waits for anybody: a reader's lock makes the learner write its next version elsewhere, the header says whether
the segment still holds what was announced, and the checksums find all else: a flipped bit, a wrong offset, a store the
CPU made visible late.
"""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from asyncrl.weights.base import StagedWeights, WeightsError, WeightsGone, WeightsLate
from asyncrl.weights.copying import copy, threads
from asyncrl.weights.image import DATA_START, HEADER, Image
from asyncrl.weights.manifest import FORMAT, TensorSpec, compare, tensors_in
from asyncrl.weights.memory import Memory, Spare
from asyncrl.weights.offers import ManifestOffer, parse_manifest_offer
from asyncrl.weights.segments import MAGIC, read_lock

WORTH_THREADS = 16 << 20
"""Bytes from which on several threads stage: to start them takes as long as a core needs for a megabyte."""


class ShmOffer(ManifestOffer, frozen=True, kw_only=True):
    """What a receiver needs to find and check one version."""

    transport: str = "shm"
    host: str
    path: str
    sequence: int  # of the segment while it holds this version

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
    """The collector's side. Keeps the segments mapped from call to call, since a page costs more to map than to copy;
    and, if it copies, one buffer of its own, for the same reason."""

    def __init__(self, *, mapped: bool = False) -> None:
        """mapped: what is staged lies in the segment itself, which stays locked until the last of its tensors is gone.
        Else it is a copy, whose memory is used for another one when the last of its tensors is gone."""
        self._mapped = mapped
        self._segments: dict[str, mmap.mmap] = {}
        self._spare = Spare()

    def stage(self, offer: Mapping[str, Any], *, deadline_s: float, verify: bool = True) -> StagedWeights:
        """Map or copy one version, and verify it. Waits for nobody; `deadline_s` bounds the copying and hashing.

        Raises WeightsGone (overwritten or removed: take the newest announcement), WeightsLate or WeightsError (anything
        else, naming the tensor, expected and found).
        """
        deadline = time.monotonic() + deadline_s
        expected = parse(offer)
        manifest = expected.manifest
        verify = verify and manifest.checksum != ""
        with ExitStack() as held:
            fd = _open(expected, held)
            check_header(fd, expected)
            segment = self._segment(fd, expected)
            data = np.frombuffer(segment, np.uint8)[DATA_START:]
            own = None if self._mapped else self._spare.take(manifest.size)
            found = _take_all(expected, data, None if own is None else own.bytes(), deadline, deadline_s, verify)
            # After the bytes and before the checksums: a mixture of two versions is `gone`, not `corrupt`.
            check_header(fd, expected)
            if verify:
                compare(manifest, found, where=str(expected))
            memory = own or Memory(segment, gone=held.pop_all().close)  # what keeps the lock, from here on
        tensors = tensors_in(memory.bytes()[0 if own else DATA_START :], manifest)
        return StagedWeights(
            expected.weights,
            tensors,
            manifest.tied,
            manifest.served,
            mapped=self._mapped,
            offer=offer if self._mapped else None,
            adapter=manifest.adapter,
        )

    def close(self) -> None:
        """What has been staged stays good."""
        self._segments.clear()
        self._spare.drop()

    def _segment(self, fd: int, expected: ShmOffer) -> mmap.mmap:
        """The segment in memory, read-only. Raises WeightsError if the file is shorter than what it should hold: a
        load from behind its end would be a SIGBUS."""
        size = os.fstat(fd).st_size
        for spec in expected.manifest.tensors:
            if spec.nbytes and (missing := DATA_START + spec.offset + spec.nbytes - size) > 0:
                raise WeightsError(f"{expected}: the file ends {missing} bytes before the end of {spec.name}")
        for path in [path for path in self._segments if path != expected.path and not os.path.exists(path)]:
            del self._segments[path]  # its memory is free when the last mapping of it is gone
        mapped = self._segments.get(expected.path)
        if mapped is None or len(mapped) != size:
            mapped = self._segments[expected.path] = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        return mapped


def parse(offer: Mapping[str, Any]) -> ShmOffer:
    """The announced offer, checked in itself. Raises WeightsError."""
    return parse_manifest_offer(offer, ShmOffer, "shm")


def check_header(fd: int, expected: ShmOffer) -> None:
    """The reader's half of the seqlock: the segment holds exactly this version, completely written."""
    header = os.pread(fd, HEADER.size, 0)
    if header == expected.header:
        return
    if header[:12] != expected.header[:12]:
        raise WeightsError(f"{expected}: no segment of format {FORMAT}, it starts with {header[:12]!r}")
    raise WeightsGone(f"{expected}: the segment holds, or gets, another version by now")


def _open(expected: ShmOffer, held: ExitStack) -> int:
    """The segment, locked: it is not overwritten before `held` is closed, which closes both."""
    try:
        fd = os.open(expected.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        held.callback(os.close, fd)
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
        raise WeightsGone(f"{expected}: the segment gets another version just now")
    held.callback(os.close, lock)
    return fd


def _take_all(
    expected: ShmOffer,
    data: NDArray[np.uint8],
    into: NDArray[np.uint8] | None,
    deadline: float,
    deadline_s: float,
    hashed: bool,
) -> list[TensorSpec]:
    """Copy all tensors where there is a copy to be made, and say what they turned out to be."""

    def take(at: int, spec: TensorSpec) -> TensorSpec:
        if time.monotonic() >= deadline:
            raise WeightsLate(
                f"{expected}: {at} of {len(expected.manifest.tensors)} tensors read within {deadline_s} s, "
                f"{spec.name} is next. Raise weights.deadline_s, or see what else uses this machine's memory"
            )
        place = slice(spec.offset, spec.offset + spec.nbytes)
        checksum = _take(data[place], None if into is None else into[place], hashed)
        return msgspec.structs.replace(spec, checksum=checksum)

    tensors = expected.manifest.tensors
    if expected.manifest.size < WORTH_THREADS or not (hashed or into is not None):
        return [take(at, spec) for at, spec in enumerate(tensors)]
    with ThreadPoolExecutor(threads(), thread_name_prefix="asyncrl-stage") as pool:
        return list(pool.map(take, range(len(tensors)), tensors))


def _take(data: NDArray[np.uint8], into: NDArray[np.uint8] | None, hashed: bool) -> str:
    """The checksum of one tensor's bytes as they will be served, "" if not wanted."""
    if into is None:
        return xxhash.xxh3_64_hexdigest(data.data) if hashed else ""
    return copy(into, data, hashed=hashed)
