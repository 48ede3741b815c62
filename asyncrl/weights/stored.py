"""A version in a folder of files: what its `manifest.json` says, what its files are called, which may be removed.

URL/RUN/1-7/  model.safetensors, or several and their index, where it is whole (`shards.py`)
              delta.bin          where it can be made of another version (`delta.py`)
              manifest.json      written last: without it the folder is nothing
URL/RUN/LATEST                   the newest version's name, for people and other programs
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from asyncrl.staleness import Weights
from asyncrl.weights.base import Recipient, WeightsError, WeightsGone
from asyncrl.weights.depot import COMMIT, Depot
from asyncrl.weights.manifest import Manifest, TensorSpec, check, combine
from asyncrl.weights.shards import INDEX, Shard, shards

FORMAT = 1
"""Of `manifest.json`, and of what follows from it: the names and headers of the files."""

DELTA = "delta.bin"
LATEST = "LATEST"

KEEP = 3
"""Newest versions that stay: a collector that began to read one has two further publications to finish it."""

OURS = re.compile(
    rf"model(-\d{{5}}-of-\d{{5}})?\.safetensors|{re.escape(INDEX)}|{re.escape(DELTA)}|{re.escape(COMMIT)}"
)
"""The files of a version; no other file is ever removed."""


class Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of `manifest.json`."""

    run: str
    writer: str  # random; of the sender that wrote it
    lineage: int
    version: int
    whole: bool  # its safetensors files are there
    manifest: Manifest  # with checksums, also where the version was published without
    format: int = FORMAT

    @property
    def weights(self) -> Weights:
        return Weights(self.lineage, self.version)

    @property
    def shards(self) -> list[Shard]:
        """Its safetensors files."""
        return shards(self.manifest, {"run": self.run, "weights": folder(self.weights), "writer": self.writer})

    def encoded(self) -> bytes:
        return msgspec.json.encode(self)


def folder(weights: Weights) -> str:
    """
    >>> folder(Weights(1, 7))
    '1-7'
    """
    return f"{weights.lineage}-{weights.version}"


def parse_folder(name: str) -> Weights | None:
    """
    >>> parse_folder("1-7"), parse_folder("notes")
    (Weights(lineage=1, version=7), None)
    """
    match = re.fullmatch(r"(\d+)-(\d+)", name)
    return Weights(int(match[1]), int(match[2])) if match else None


def read_stored(depot: Depot, weights: Weights, checksum: str) -> Stored:
    """The `manifest.json` of `weights`, which has this xxh3_64. Raises WeightsGone: removed; WeightsError: not the one
    that was announced, since it is damaged or another's."""
    name = f"{folder(weights)}/{COMMIT}"
    try:
        content = depot.content(name)
    except FileNotFoundError as error:
        raise WeightsGone(f"weights {tuple(weights)}: {depot.url}/{name} has been removed") from error
    where = f"{depot.url}/{name}"
    found = xxhash.xxh3_64_hexdigest(content)
    if found != checksum:
        raise WeightsError(
            f"{where}: expected xxh3 {checksum}, found {found}: it is damaged, or another learner writes there; "
            "runs of one name need a weights.url each"
        )
    try:
        stored = msgspec.json.decode(content, type=Stored)
    except msgspec.DecodeError as error:
        raise WeightsError(f"{where}: {error}") from error
    if (stored.format, stored.weights) != (FORMAT, weights):
        raise WeightsError(
            f"{where}: format {stored.format} of weights {tuple(stored.weights)}, expected {FORMAT} of {tuple(weights)}"
        )
    check(stored.manifest, where)
    return stored


def hashed(tensors: Iterable[TensorSpec], data: NDArray[np.uint8]) -> list[TensorSpec]:
    """The same specs with the checksums of the bytes that an image has there."""
    return [
        msgspec.structs.replace(
            spec, checksum=xxhash.xxh3_64_hexdigest(data[spec.offset : spec.offset + spec.nbytes].data)
        )
        for spec in tensors
    ]


def with_checksums(manifest: Manifest, data: NDArray[np.uint8]) -> Manifest:
    """The manifest of an image that was published without checksums, with those of its bytes."""
    if manifest.checksum:
        return manifest
    tensors = tuple(hashed(manifest.tensors, data))
    return msgspec.structs.replace(manifest, tensors=tensors, checksum=combine(spec.checksum for spec in tensors))


def removable(
    names: Iterable[str], last: Sequence[Weights], recipients: Iterable[Recipient], needed: Collection[Weights]
) -> list[str]:
    """Which of the folders `names` nobody needs: all versions but the `last` that the sender has written (newest last),
    what recipients serve or stage, and `needed`. Those of a later lineage are a newer learner's and stay, and so does
    whatever is no version."""
    kept = {*last, *needed}
    for recipient in recipients:
        kept |= {weights for weights in (recipient.serving, recipient.weights) if weights is not None}
    found = {name: weights for name in names if (weights := parse_folder(name))}
    return [name for name, weights in found.items() if weights.lineage <= last[-1].lineage and weights not in kept]
