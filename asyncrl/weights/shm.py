"""Weights between processes of one host: files in shared memory, overwritten in place.

The publisher copies each tensor in once, a receiver copies it out once; nobody waits for anybody. What makes that safe:

- **Who may overwrite.** A segment that holds the newest version, or one that a live collector serves or stages
  (`in_use`), is left alone; a late reader costs one segment more, never a wait.
- **Seqlock.** The header's sequence number is odd while a version is written and grows with each; a receiver wants the
  announced number before and after its copy, so that what was overwritten meanwhile is `WeightsGone`, never served.
- **Checksums.** Every tensor is hashed in the receiver's private copy. They catch all else: a flipped bit, a wrong
  offset, a store the CPU made visible late.
- **Who cleans up.** `segments.py`.

Not `multiprocessing.shared_memory`: up to Python 3.12 every process that attaches a block registers it with its own
resource tracker, which unlinks it when that process ends - a collector that restarts would take the learner's weights
away. Plain reads and writes rather than a mapping: a full /dev/shm is then an error with a message, not a SIGBUS.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from asyncrl.staleness import Weights
from asyncrl.weights.base import StagedWeights, WeightsError, WeightsGone
from asyncrl.weights.manifest import (
    DTYPES,
    FORMAT,
    Manifest,
    TensorSpec,
    aligned,
    combine,
    compare,
    describe,
    tensor_bytes,
)
from asyncrl.weights.segments import MAGIC, Segment, create, remove, segment_folder, sweep

HEADER = struct.Struct("<8sIxxxxQqq")  # magic, format, sequence, lineage, version

DATA_START = 4096
"""Bytes. Tensors begin on a page of their own."""


class ShmDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What a receiver needs to find and check one version; announced through the buffer, which may add keys."""

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


class ShmPublisher:
    """The learner's side. Creating it removes the segments of publishers that died."""

    def __init__(self, run: str, *, folder: Path | None = None) -> None:
        """`run` names the segments for people; `folder` defaults to shared memory (`segment_folder`)."""
        self._run = run
        self._folder = segment_folder() if folder is None else folder
        self._segments: list[Segment] = []
        self._newest: Segment | None = None
        self._closed = False
        sweep(self._folder)

    @property
    def segments(self) -> tuple[Path, ...]:
        """The files held now; two, and one more for each version that late readers keep in use."""
        return tuple(segment.path for segment in self._segments)

    def publish(
        self,
        weights: Weights,
        source: Iterable[tuple[str, torch.Tensor]],
        *,
        tied: Mapping[str, str],
        in_use: set[Weights],
    ) -> dict[str, Any]:
        """Write one version and return its document, JSON-able.

        `source` is consumed one tensor at a time, so it may be a generator that casts. Raises WeightsError: shared
        memory is full, a tensor cannot be published, or a name comes twice; receivers then find no such version.
        """
        if self._closed:
            raise WeightsError(f"weights {tuple(weights)} published after close")
        segment = self._take(in_use)
        specs = self._write(segment, weights, source)
        self._newest = segment
        self._drop_surplus(in_use)
        document = ShmDocument(
            host=socket.gethostname(),
            path=str(segment.path),
            sequence=segment.sequence,
            lineage=weights.lineage,
            version=weights.version,
            manifest=Manifest(tuple(specs), dict(tied), combine(spec.checksum for spec in specs)),
        )
        result: dict[str, Any] = msgspec.to_builtins(document)
        return result

    def close(self) -> None:
        """Remove all segments. What receivers have opened or copied already stays good."""
        self._closed = True
        while self._segments:
            remove(self._segments.pop())

    def _take(self, in_use: set[Weights]) -> Segment:
        """A segment that may be overwritten; a new one if there is none."""
        for segment in self._segments:
            if self._is_free(segment, in_use):
                return segment
        self._segments.append(create(self._folder, self._run))
        return self._segments[-1]

    def _is_free(self, segment: Segment, in_use: set[Weights]) -> bool:
        # The newest is announced, or about to be: a collector may open it before any heartbeat of its says so.
        return segment is not self._newest and segment.holds not in in_use

    def _drop_surplus(self, in_use: set[Weights]) -> None:
        """Keep one free segment, the target of the next version; the late readers that needed more have gone on."""
        for segment in [segment for segment in self._segments if self._is_free(segment, in_use)][1:]:
            self._segments.remove(segment)
            remove(segment)

    def _write(
        self, segment: Segment, weights: Weights, source: Iterable[tuple[str, torch.Tensor]]
    ) -> list[TensorSpec]:
        segment.holds = None
        segment.sequence |= 1  # odd: nobody accepts what follows, and it stays odd if the write fails
        self._put(segment, HEADER.pack(MAGIC, FORMAT, segment.sequence, *weights), 0)
        specs: dict[str, TensorSpec] = {}
        offset = DATA_START
        for name, tensor in source:
            if name in specs:
                raise WeightsError(f"weights {tuple(weights)}: tensor {name} comes twice")
            content = tensor_bytes(name, tensor)
            specs[name] = describe(name, tensor, content, offset=offset)
            self._put(segment, content, offset)
            offset = aligned(offset + content.nbytes)
        segment.sequence += 1
        self._put(segment, HEADER.pack(MAGIC, FORMAT, segment.sequence, *weights), 0)
        segment.holds = weights
        return list(specs.values())

    def _put(self, segment: Segment, content: bytes | memoryview, offset: int) -> None:
        rest = memoryview(content)
        try:
            while rest:  # one call writes 2 GiB at most
                written = os.pwrite(segment.fd, rest, offset)
                rest, offset = rest[written:], offset + written
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise WeightsError(
                f"{self._folder} is full: {len(rest)} bytes do not fit, {shutil.disk_usage(self._folder).free} are "
                "free. Two versions of the weights must fit, and one more for each collector that lags; enlarge it "
                "(docker run --shm-size=...)"
            ) from error


class ShmReceiver:
    """The collector's side. Holds nothing between calls."""

    def stage(self, document: Mapping[str, Any], *, deadline_s: float) -> StagedWeights:
        """Copy one version out and verify it. Waits for nobody; `deadline_s` bounds the copy itself.

        Raises WeightsGone (overwritten or removed: take the newest announcement) or WeightsError (anything else, naming
        the tensor, expected and found).
        """
        expected = parse(document)
        fd = _open(expected)
        try:
            check_header(fd, expected)
            tensors, found = _copy(fd, expected, deadline_s)
            # After the copy and before the checksums: a mixture of two versions is `gone`, not `corrupt`.
            check_header(fd, expected)
        finally:
            os.close(fd)
        compare(expected.manifest, found, where=str(expected))
        return StagedWeights(expected.weights, tensors, expected.manifest.tied, expected.manifest.checksum)

    def close(self) -> None:
        """Nothing is held between calls."""


def parse(document: Mapping[str, Any]) -> ShmDocument:
    """The announced document, checked in itself. Raises WeightsError."""
    try:
        parsed = msgspec.convert(dict(document), ShmDocument)
    except msgspec.ValidationError as error:
        raise WeightsError(f"this is no document of transport shm: {error}") from error
    manifest = parsed.manifest
    if parsed.transport != "shm" or manifest.format != FORMAT:
        raise WeightsError(
            f"transport {parsed.transport!r}, manifest format {manifest.format}: expected 'shm', {FORMAT}; "
            "learner and collector must run the same version of asyncrl"
        )
    if len({spec.name for spec in manifest.tensors}) != len(manifest.tensors):
        raise WeightsError(f"{parsed}: the manifest names a tensor twice")
    for spec in manifest.tensors:
        if spec.dtype not in DTYPES:
            raise WeightsError(f"{parsed}: {spec.name} has type {spec.dtype!r}; known are {', '.join(DTYPES)}")
        if min(spec.shape, default=0) < 0 or spec.nbytes != math.prod(spec.shape) * DTYPES[spec.dtype].itemsize:
            raise WeightsError(
                f"{parsed}: {spec.name} is {spec.dtype}{list(spec.shape)} and cannot have {spec.nbytes} bytes"
            )
    if (found := combine(spec.checksum for spec in manifest.tensors)) != manifest.checksum:
        raise WeightsError(f"{parsed}: combined checksum {manifest.checksum} announced, but its tensors give {found}")
    return parsed


def check_header(fd: int, expected: ShmDocument) -> None:
    """The reader's half of the seqlock: the segment holds exactly this version, completely written."""
    header = os.pread(fd, HEADER.size, 0)
    if header == expected.header:
        return
    if header[:12] != expected.header[:12]:
        raise WeightsError(f"{expected}: no segment of format {FORMAT}, it starts with {header[:12]!r}")
    raise WeightsGone(f"{expected}: the segment holds, or gets, another version by now")


def _open(expected: ShmDocument) -> int:
    try:
        return os.open(expected.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        if expected.host == socket.gethostname():
            raise WeightsGone(f"{expected}: the file has been removed") from error
        raise WeightsError(
            f"{expected} are on host {expected.host}; this collector runs on {socket.gethostname()}: "
            "transport shm needs learner and collectors on one host"
        ) from error
    except OSError as error:
        raise WeightsError(f"{expected}: {error.strerror}; learner and collectors must run as the same user") from error


def _copy(fd: int, expected: ShmDocument, deadline_s: float) -> tuple[dict[str, torch.Tensor], list[TensorSpec]]:
    """Private copies of all tensors, and what they turned out to be."""
    deadline = time.monotonic() + deadline_s
    tensors: dict[str, torch.Tensor] = {}
    found: list[TensorSpec] = []
    for spec in expected.manifest.tensors:
        if time.monotonic() >= deadline:
            raise WeightsError(
                f"{expected}: {len(found)} of {len(expected.manifest.tensors)} tensors copied within {deadline_s} s, "
                f"{spec.name} is next. Raise weights.deadline_s, or see what else uses this machine's memory"
            )
        tensor = torch.empty(spec.shape, dtype=DTYPES[spec.dtype])
        content = tensor_bytes(spec.name, tensor)  # contiguous and on the CPU: the tensor's own memory
        _read(fd, content, spec.offset, expected, spec.name)
        found.append(describe(spec.name, tensor, content, offset=spec.offset))
        tensors[spec.name] = tensor
    return tensors, found


def _read(fd: int, into: memoryview, offset: int, expected: ShmDocument, name: str) -> None:
    with open(fd, "rb", buffering=0, closefd=False) as file:
        file.seek(offset)
        while into:  # one call reads 2 GiB at most
            count = file.readinto(into)
            if not count:
                raise WeightsError(f"{expected}: the file ends {len(into)} bytes before the end of {name}")
            into = into[count:]
