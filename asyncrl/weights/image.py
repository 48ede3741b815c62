"""The learner's side of all transports: each version is written once, as flat bytes in shared memory.

An image is what `manifest.py` describes: the tensors' bytes at their offsets. It lies in a segment, a file of shared
memory that collectors of this host read directly (`shm.py`) and from which senders carry it further, while training
goes on. Segments take turns:

- **Who may overwrite.** A segment that holds the newest version, that a sender of this process reads, or that a reader
  of any process has locked (`segments.py`), is left alone; a late reader costs one segment more, never a wait.
- **Seqlock.** The header's sequence number is odd while a version is written and grows with each; a reader wants the
  announced number before and after its copy, so that what was overwritten meanwhile is `WeightsGone`, never served.
- **Who cleans up.** `segments.py`.
- **A full /dev/shm is an error**, not a SIGBUS: what a file grows by is written by calls, which can fail; what it has
  is then written through a mapping, which is twice as fast and needs no more memory.

Not `multiprocessing.shared_memory`: up to Python 3.12 every process that attaches a block registers it with its own
resource tracker, which unlinks it when that process ends - a collector that restarts would take the learner's weights
away.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from asyncrl.staleness import Weights
from asyncrl.weights.base import WeightsError
from asyncrl.weights.copying import CHUNK, Copier
from asyncrl.weights.manifest import (
    FORMAT,
    Adapter,
    Manifest,
    Pieces,
    TensorSpec,
    aligned,
    check_publishable,
    combine,
    describe,
    tensor_bytes,
)
from asyncrl.weights.segments import MAGIC, Segment, create, segment_folder, sweep

HEADER = struct.Struct("<8sIxxxxQqq")  # magic, format, sequence, lineage, version

DATA_START = 4096
"""Bytes. The manifest's offsets count from here; tensors begin on a page of their own."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
        return self.manifest.size

    def retain(self) -> None:
        """A sender begins to read: the bytes stay until `release`. In any thread. Raises WeightsGone if they are no
        longer there, or another version is about to take their place."""
        self._segment.retain(self.sequence)

    def release(self) -> None:
        """The sender has read. In any thread, once for each `retain`."""
        self._segment.release()

    def data(self) -> NDArray[np.uint8]:
        """uint8 [nbytes], read-only, mapped: no copy. Tensor `spec` is `data()[spec.offset:spec.offset + spec.nbytes]`.
        Only while retained. Raises WeightsGone if the images have been closed meanwhile."""
        data = np.frombuffer(self._segment.mapping(), np.uint8)[DATA_START : DATA_START + self.nbytes]
        data.flags.writeable = False
        return data


class Images:
    """The segments of one learner. Creating it removes those of learners that died."""

    def __init__(self, run: str, *, folder: Path | None = None) -> None:
        """`run` names the segments for people; `folder` defaults to shared memory (`segment_folder`)."""
        self.newest: Image | None = None
        self._run = run
        self._folder = segment_folder() if folder is None else folder
        self._segments: list[Segment] = []
        self._closed = False
        self._copier = Copier()
        sweep(self._folder)

    @property
    def segments(self) -> tuple[Path, ...]:
        """The files held now; two, and one more for each version that is still read."""
        return tuple(segment.path for segment in self._segments)

    def write(
        self,
        weights: Weights,
        source: Iterable[tuple[str, torch.Tensor | Pieces]],
        *,
        tied: Mapping[str, str],
        hashed: bool = True,
        adapter: Adapter | None = None,
    ) -> Image:
        """Write one version; it is the newest from then on. One call at a time.

        `source` is consumed one tensor, or one piece of a tensor, at a time, so it may be a generator that casts or
        gathers; a whole tensor must not change before this returns. hashed: with checksums of every tensor; without,
        its bytes can never be compared with what is served. adapter: what the tensors are the factors of.

        Raises WeightsError: shared memory is full, a tensor cannot be published, or a name comes twice; readers then
        find no such version.
        """
        if self._closed:
            raise WeightsError(f"weights {tuple(weights)} published after close")
        try:
            segment = self._taken()
            try:
                specs = _write(segment, weights, source, self._copier, hashed=hashed)
            except OSError:
                self._segments.remove(segment)
                segment.remove()  # what it grew by is what somebody else lacks now
                raise
            finally:
                segment.give()
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise WeightsError(
                f"weights {tuple(weights)} do not fit in {self._folder} ({error.strerror}): "
                f"{shutil.disk_usage(self._folder).free} bytes are free. Two versions of the weights must fit, and one "
                "more for each that lagging collectors serve; enlarge it (docker run --shm-size=...)"
            ) from error
        combined = combine(spec.checksum for spec in specs) if hashed else ""
        self.newest = Image(segment, weights, Manifest(tuple(specs), dict(tied), combined, adapter=adapter))
        self._drop_surplus()
        return self.newest

    def close(self) -> None:
        """Remove all segments. What readers have opened, mapped or copied already stays good."""
        self._closed = True
        while self._segments:
            self._segments.pop().remove()
        self._copier.close()

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
            segment.remove()


def _write(
    segment: Segment,
    weights: Weights,
    source: Iterable[tuple[str, torch.Tensor | Pieces]],
    copier: Copier,
    *,
    hashed: bool,
) -> list[TensorSpec]:
    segment.sequence |= 1  # odd: nobody accepts what follows, and it stays odd if the write fails
    os.pwrite(segment.fd, HEADER.pack(MAGIC, FORMAT, segment.sequence, *weights), 0)
    mapped = np.frombuffer(segment.mapping(), np.uint8)
    specs: dict[str, TensorSpec] = {}
    copying: dict[Future[str], tuple[str, torch.Tensor]] = {}

    def take_finished() -> None:
        """Of those under way, once there is one. Not the oldest: if that is large, the other threads would wait too."""
        finished, _ = wait(copying, return_when=FIRST_COMPLETED)
        for checksum in finished:
            name, _ = copying.pop(checksum)
            specs[name] = msgspec.structs.replace(specs[name], checksum=checksum.result())

    offset = 0
    try:
        for name, tensor in source:
            if name in specs:
                raise WeightsError(f"weights {tuple(weights)}: tensor {name} comes twice")
            start, end = DATA_START + offset, DATA_START + offset + tensor.nbytes
            checksum = ""
            if isinstance(tensor, Pieces):
                checksum = _gather(segment.fd, mapped, start, name, tensor, hashed=hashed)
            elif end > len(mapped):
                checksum = _grow(segment.fd, start, tensor_bytes(name, tensor), hashed=hashed)
            else:
                check_publishable(name, tensor)
                if tensor.device.type == "cpu" and tensor.is_contiguous():
                    content = np.asarray(tensor_bytes(name, tensor))
                    copying[copier.begin(mapped[start:end], content, hashed=hashed)] = name, tensor
                else:
                    checksum = _store(mapped[start:end], tensor, hashed=hashed)
            specs[name] = describe(name, tensor, offset=offset, checksum=checksum)
            offset = aligned(offset + tensor.nbytes)
            while len(copying) > 2 * copier.workers:  # each is a tensor in memory, if `source` makes them
                take_finished()
        while copying:
            take_finished()
    finally:
        wait(copying)  # they write here: nobody else may before they have ended
    segment.sequence += 1
    os.pwrite(segment.fd, HEADER.pack(MAGIC, FORMAT, segment.sequence, *weights), 0)
    return list(specs.values())


def _store(into: NDArray[np.uint8], tensor: torch.Tensor, *, hashed: bool) -> str:
    """The bytes, row-major, of a tensor that lies otherwise or elsewhere; their checksum, "" without."""
    torch.from_numpy(into).view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    return xxhash.xxh3_64_hexdigest(into.data) if hashed else ""


def _gather(fd: int, mapped: NDArray[np.uint8], start: int, name: str, pieces: Pieces, *, hashed: bool) -> str:
    """Write a tensor's pieces one after the other. Returns the tensor's checksum, "" without."""
    digest, at = xxhash.xxh3_64(), start
    for part in pieces.parts:
        content = tensor_bytes(name, part)
        end = at + len(content)
        if end <= len(mapped):
            mapped[at:end] = content
        else:
            _grow(fd, at, content, hashed=False)
        if hashed:
            digest.update(content)
        at = end
        del part, content  # so that whoever makes the next piece can use this one's memory
    if at != start + pieces.nbytes:
        raise WeightsError(f"{name} of shape {pieces.shape} has {pieces.nbytes} bytes, of which {at - start} came")
    return digest.hexdigest() if hashed else ""


def _grow(fd: int, offset: int, content: memoryview, *, hashed: bool) -> str:
    """Write where the file has no pages yet. Returns the checksum, "" without. Raises OSError where memory is full."""
    digest = xxhash.xxh3_64()
    for start in range(0, len(content), CHUNK):
        chunk = content[start : start + CHUNK]
        if hashed:
            digest.update(chunk)
        while chunk:
            written = os.pwrite(fd, chunk, offset)
            chunk, offset = chunk[written:], offset + written
    return digest.hexdigest() if hashed else ""
