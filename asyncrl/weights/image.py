"""The learner's side of all transports: each version is written once, as flat bytes in shared memory.

An image is what `manifest.py` describes: the tensors' bytes at their offsets. It lies in a segment, a file of shared
memory that collectors of this host read directly (`shm.py`) and from which senders carry it further, while training
goes on. Segments take turns:

- **Who may overwrite.** A segment that holds the newest version, that a sender of this process reads, or that a reader
  of any process has locked (`segments.py`), is left alone; a late reader costs one segment more, never a wait.
- **Seqlock.** The header's sequence number is odd while a version is written and grows with each; a reader wants the
  announced number before and after its copy, so that what was overwritten meanwhile is `WeightsGone`, never served.
- **Who cleans up.** `segments.py`.

Not `multiprocessing.shared_memory`: up to Python 3.12 every process that attaches a block registers it with its own
resource tracker, which unlinks it when that process ends - a collector that restarts would take the learner's weights
away. Plain writes rather than a mapping: a full /dev/shm is then an error with a message, not a SIGBUS.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.staleness import Weights
from asyncrl.weights.base import WeightsError
from asyncrl.weights.manifest import FORMAT, Manifest, TensorSpec, aligned, combine, describe, tensor_bytes
from asyncrl.weights.segments import MAGIC, Segment, create, remove, segment_folder, sweep

HEADER = struct.Struct("<8sIxxxxQqq")  # magic, format, sequence, lineage, version

DATA_START = 4096
"""Bytes. The manifest's offsets count from here; tensors begin on a page of their own."""


class Image:
    """One version in shared memory. Good while it is the newest, or between `retain` and `release`."""

    def __init__(self, segment: Segment, weights: Weights, manifest: Manifest) -> None:
        self.weights = weights
        self.manifest = manifest
        self.path = segment.path
        self.sequence = segment.sequence
        self._segment = segment

    @property
    def nbytes(self) -> int:
        """Bytes of the image, gaps included."""
        last = self.manifest.tensors[-1] if self.manifest.tensors else None
        return 0 if last is None else last.offset + last.nbytes

    def retain(self) -> None:
        """A sender begins to read: the bytes stay. In the thread that called `Images.write`, before the next one."""
        self._segment.users += 1

    def release(self) -> None:
        """The sender has read; in any thread."""
        self._segment.users -= 1

    def data(self) -> NDArray[np.uint8]:
        """uint8 [nbytes], read-only, mapped: no copy. Tensor `spec` is `data()[spec.offset:spec.offset + spec.nbytes]`.
        Only while retained."""
        size = DATA_START + self.nbytes
        mapped = mmap.mmap(self._segment.fd, size, prot=mmap.PROT_READ)
        return np.frombuffer(mapped, np.uint8)[DATA_START:size]


class Images:
    """The segments of one learner. Creating it removes those of learners that died."""

    def __init__(self, run: str, *, folder: Path | None = None) -> None:
        """`run` names the segments for people; `folder` defaults to shared memory (`segment_folder`)."""
        self.newest: Image | None = None
        self._run = run
        self._folder = segment_folder() if folder is None else folder
        self._segments: list[Segment] = []
        self._closed = False
        sweep(self._folder)

    @property
    def segments(self) -> tuple[Path, ...]:
        """The files held now; two, and one more for each version that is still read."""
        return tuple(segment.path for segment in self._segments)

    def write(
        self,
        weights: Weights,
        source: Iterable[tuple[str, torch.Tensor]],
        *,
        tied: Mapping[str, str],
        hashed: bool = True,
    ) -> Image:
        """Write one version; it is the newest from then on.

        `source` is consumed one tensor at a time, so it may be a generator that casts or gathers. hashed: with
        checksums of every tensor; without, its bytes can never be compared with what is served.

        Raises WeightsError: shared memory is full, a tensor cannot be published, or a name comes twice; readers then
        find no such version.
        """
        if self._closed:
            raise WeightsError(f"weights {tuple(weights)} published after close")
        segment = self._taken()
        try:
            specs = self._write(segment, weights, source, hashed)
        finally:
            segment.give()
        combined = combine(spec.checksum for spec in specs) if hashed else ""
        self.newest = Image(segment, weights, Manifest(tuple(specs), dict(tied), combined))
        self._drop_surplus()
        return self.newest

    def close(self) -> None:
        """Remove all segments. What readers have opened, mapped or copied already stays good."""
        self._closed = True
        while self._segments:
            remove(self._segments.pop())

    def _taken(self) -> Segment:
        """A segment that may be overwritten, taken; a new one if there is none."""
        for segment in self._others():
            if segment.take():
                return segment
        self._segments.append(create(self._folder, self._run))
        self._segments[-1].take()
        return self._segments[-1]

    def _others(self) -> list[Segment]:
        """All but the newest: that is announced, or about to be, and a reader may open it at any time."""
        newest = None if self.newest is None else self.newest.path
        return [segment for segment in self._segments if segment.path != newest]

    def _drop_surplus(self) -> None:
        """Keep one free segment, the target of the next version; the late readers that needed more have gone on."""
        free = [segment for segment in self._others() if segment.take()]
        for segment in free[:1]:
            segment.give()
        for segment in free[1:]:
            self._segments.remove(segment)
            remove(segment)

    def _write(
        self, segment: Segment, weights: Weights, source: Iterable[tuple[str, torch.Tensor]], hashed: bool
    ) -> list[TensorSpec]:
        segment.holds = None
        segment.sequence |= 1  # odd: nobody accepts what follows, and it stays odd if the write fails
        self._put(segment, HEADER.pack(MAGIC, FORMAT, segment.sequence, *weights), 0)
        specs: dict[str, TensorSpec] = {}
        offset = 0
        for name, tensor in source:
            if name in specs:
                raise WeightsError(f"weights {tuple(weights)}: tensor {name} comes twice")
            content = tensor_bytes(name, tensor)
            specs[name] = describe(name, tensor, content, offset=offset, hashed=hashed)
            self._put(segment, content, DATA_START + offset)
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
