"""Lossless difference of two byte images of one layout: which elements changed, and their new bits. Pure; numpy only.

An *overwrite*, not a difference of values or an xor: applied twice, or after a try that broke off, it gives the same.
Elements are compared as integers of their size, so that -0.0, the payload of a NaN and types numpy does not know
(bfloat16, float8) are bytes like all others.

An image is taken in chunks, so that what the codec needs besides is small and stays in the CPU's cache. Each changed
chunk is a record and two streams, positions and values:

| positions | bytes                           | taken                                                |
|-----------|---------------------------------|------------------------------------------------------|
| gaps      | 2 per change, u16               | where that is less: below one change in 16 elements  |
| bitmap    | 1 per 8 elements, low bit first | else                                                 |

A gap counts the unchanged elements before a change; 65535 of them without a change are written as 65535 and no value.
Streams go through zstd at its fastest level where that makes them smaller. All integers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

MAGIC = b"asyncrlD"
FORMAT = 1
HEAD = struct.Struct("<8sIIQQ")  # magic, format, records, changed elements, bytes of the image

RECORD = np.dtype(
    [
        ("offset", "<u8"),  # bytes from the image's start
        ("elements", "<u4"),  # of the chunk
        ("changed", "<u4"),
        ("positions_raw", "<u4"),  # bytes before zstd; as many as stored: without zstd
        ("positions", "<u4"),  # bytes stored
        ("values", "<u4"),
        ("itemsize", "u1"),
        ("bitmap", "u1"),
        ("unused", "<u2"),
    ]
)

CHUNK = 1 << 20
"""Elements. Both sides' bytes, mask and positions then fit a core's share of the cache; below, Python's share grows."""

ESCAPE = 0xFFFF

DENSE_SHARE = 0.25
"""Of an image's bytes: with more of them changed a delta is larger than half of the image and takes longer to make
and apply than the bytes it saves take to copy (`asyncrl bench weights`)."""

_ZSTD = pa.Codec("zstd", compression_level=1)


class Extent(NamedTuple):
    """Where one tensor lies in an image. `offset` and `nbytes` are multiples of `itemsize`: 1, 2, 4 or 8 bytes."""

    offset: int
    nbytes: int
    itemsize: int


@dataclass(frozen=True, slots=True)
class Delta:
    """An encoded difference: `parts` one after the other are the file."""

    parts: tuple[bytes, ...]
    nbytes: int
    checksum: str  # xxh3_64 hex of all bytes
    changed: int  # elements
    elements: int  # of both images

    @property
    def density(self) -> float:
        """Share of the elements that changed."""
        return self.changed / self.elements if self.elements else 0.0


def encode(base: Bytes, new: Bytes, extents: Iterable[Extent], *, dense_share: float = DENSE_SHARE) -> Delta | None:
    """What turns `base` into `new`, both uint8 [n]; bytes outside `extents` do not count. None, as soon as it is known:
    more than `dense_share` of the extents' bytes changed. Raises ValueError: another length, an impossible extent."""
    if base.shape != new.shape:
        raise ValueError(f"images of {base.size} and {new.size} bytes have no difference: one layout is needed")
    extents = tuple(extents)
    most = dense_share * sum(extent.nbytes for extent in extents)
    records: list[tuple[int, ...]] = []
    streams: list[bytes] = []
    changed_bytes = 0
    for offset, elements, itemsize in _chunks(extents, new.size):
        span = slice(offset, offset + elements * itemsize)
        old_words, new_words = base[span].view(f"<u{itemsize}"), new[span].view(f"<u{itemsize}")
        mask = _Mask(elements)
        np.not_equal(old_words, new_words, out=mask.of_chunk)
        changed = int(np.count_nonzero(mask.of_chunk))
        if not changed:
            continue
        changed_bytes += changed * itemsize
        if changed_bytes > most:
            return None
        where = mask.positions(changed)
        bitmap = 16 * changed >= elements  # as in the table; a chunk has at most 16 escapes
        raw = np.packbits(mask.of_chunk, bitorder="little") if bitmap else _gaps(where)
        positions, values = _squeezed(raw), _squeezed(new_words[where])
        streams += [positions, values]
        records.append((offset, elements, changed, raw.nbytes, len(positions), len(values), itemsize, bitmap, 0))
    table = np.array(records, RECORD)
    changed = int(table["changed"].sum())
    parts = (HEAD.pack(MAGIC, FORMAT, len(records), changed, new.size), table.tobytes(), *streams)
    checksum = xxhash.xxh3_64()
    for part in parts:
        checksum.update(part)
    return Delta(
        parts,
        nbytes=sum(map(len, parts)),
        checksum=checksum.hexdigest(),
        changed=changed,
        elements=sum(extent.nbytes // extent.itemsize for extent in extents),
    )


def apply(content: bytes | memoryview, image: Bytes) -> int:
    """Overwrite what `content` says changed in `image`, uint8 [n], writable. Returns how many elements.

    Raises ValueError for bytes that `encode` did not write or that are for an image of another size; the image is then
    undefined.
    """
    view = memoryview(content)
    if len(view) < HEAD.size or bytes(view[:8]) != MAGIC:
        raise ValueError(f"no delta: it starts with {bytes(view[:8])!r}, not {MAGIC!r}")
    _, found, count, changed, size = HEAD.unpack_from(view)
    if found != FORMAT or size != image.size:
        raise ValueError(
            f"a delta of format {found} for an image of {size} bytes; expected format {FORMAT}, {image.size} bytes"
        )
    at = HEAD.size + count * RECORD.itemsize
    if len(view) < at:
        raise ValueError(f"the delta ends in its table: {len(view)} bytes, {at} expected")
    table = np.frombuffer(view, RECORD, count, HEAD.size)
    end = at + int(table["positions"].sum(dtype=np.uint64)) + int(table["values"].sum(dtype=np.uint64))
    if len(view) != end or int(table["changed"].sum(dtype=np.uint64)) != changed:
        raise ValueError(f"the delta has {len(view)} bytes where its table says {end}")
    for record in table:
        positions = view[at : at + int(record["positions"])]
        values = view[at + len(positions) : at + len(positions) + int(record["values"])]
        at += len(positions) + len(values)
        _apply(record, positions, values, image)
    return int(changed)


def _apply(record: np.void, positions: memoryview, values: memoryview, image: Bytes) -> None:
    offset, elements, changed = int(record["offset"]), int(record["elements"]), int(record["changed"])
    itemsize, raw = int(record["itemsize"]), int(record["positions_raw"])
    if itemsize not in (1, 2, 4, 8) or elements > CHUNK or offset + elements * itemsize > image.size:
        raise ValueError(f"a record of {elements} x {itemsize} bytes at {offset} of an image of {image.size}")
    if changed > elements or raw > 2 * elements:  # no stream is larger
        raise ValueError(f"a record at {offset} of {changed} changes in {elements} elements, {raw} bytes of positions")
    words = image[offset : offset + elements * itemsize].view(f"<u{itemsize}")
    content = _expanded(positions, raw)
    if record["bitmap"]:
        mask = _Mask(elements)
        bits = np.frombuffer(content, np.uint8)
        mask.of_chunk[:] = np.unpackbits(bits, count=elements, bitorder="little").view(np.bool_)
        where = mask.positions(changed)
    else:
        where = _from_gaps(np.frombuffer(content, "<u2"))
    new = np.frombuffer(_expanded(values, changed * itemsize), f"<u{itemsize}")
    if where.size != changed or new.size != changed or (changed and where[-1] >= elements):
        raise ValueError(f"a record at {offset} of {changed} changes has {where.size} positions, {new.size} values")
    words[where] = new


def _chunks(extents: Iterable[Extent], size: int) -> Iterator[tuple[int, int, int]]:
    """(offset, elements, itemsize) of each chunk."""
    for extent in extents:
        offset, nbytes, itemsize = extent
        if not nbytes:
            continue  # it may lie behind the end
        if itemsize not in (1, 2, 4, 8) or offset % itemsize or nbytes % itemsize or offset + nbytes > size:
            raise ValueError(f"{extent} does not lie in an image of {size} bytes, or not at a multiple of its itemsize")
        for at in range(offset, offset + nbytes, CHUNK * itemsize):
            yield at, min(CHUNK, (offset + nbytes - at) // itemsize), itemsize


class _Mask:
    """Which elements of a chunk changed."""

    def __init__(self, elements: int) -> None:
        # numpy finds the True ones of a mask branch by branch up to a share of 10 %, and without branches above: from 2
        # to 10 % the second way is up to three times faster. A tail of True ones has it taken.
        self._elements = elements
        self._whole = np.empty(elements + elements // 8, np.bool_)
        self._whole[elements:] = True
        self.of_chunk = self._whole[:elements]

    def positions(self, changed: int) -> NDArray[np.intp]:
        """Of the `changed` True ones, in order."""
        if 40 * changed < self._elements:
            return np.flatnonzero(self.of_chunk)
        return np.flatnonzero(self._whole)[:changed]


def _gaps(where: NDArray[np.intp]) -> NDArray[np.uint16]:
    """The gaps stream of ascending positions (at least one)."""
    gaps = np.diff(where, prepend=-1) - 1
    if gaps.max() < ESCAPE:
        return gaps.astype("<u2")
    escapes, rest = np.divmod(gaps, ESCAPE)
    stream = np.full(where.size + int(escapes.sum()), ESCAPE, "<u2")
    stream[np.arange(where.size) + np.cumsum(escapes)] = rest
    return stream


def _from_gaps(stream: NDArray[np.uint16]) -> NDArray[np.int64]:
    """The positions of a gaps stream."""
    is_value = stream != ESCAPE
    steps = stream.astype(np.int64)
    steps += is_value
    where: NDArray[np.int64] = np.cumsum(steps, out=steps)
    where -= 1
    return where if is_value.all() else where[is_value]


def _squeezed(stream: NDArray[np.generic]) -> bytes:
    """Through zstd, or as it is where that is not smaller."""
    raw = stream.tobytes()
    packed: bytes = _ZSTD.compress(raw, asbytes=True)
    return packed if len(packed) < len(raw) else raw


def _expanded(stored: memoryview, size: int) -> bytes | memoryview:
    if len(stored) == size:
        return stored
    try:
        expanded: bytes = _ZSTD.decompress(stored, decompressed_size=size, asbytes=True)
    except OSError as error:
        raise ValueError(f"a stream of {len(stored)} bytes is no zstd of {size}: {error}") from error
    return expanded
