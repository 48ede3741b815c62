"""Transport `file`: versions as safetensors files in a folder that learner and collectors see, or in an object store.

It needs nothing but that folder, and is what collectors fall back to. Layout: `stored.py`; how a version becomes
visible at once: `depot.py`.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from asyncrl.staleness import Weights
from asyncrl.weights.base import Recipient, StagedWeights, Transport, WeightsError, WeightsGone, WeightsLate
from asyncrl.weights.delta_codec import Bytes
from asyncrl.weights.depot import PIECE, Depot, open_depot
from asyncrl.weights.folder_sender import FolderOffer, FolderSender
from asyncrl.weights.image import Image
from asyncrl.weights.manifest import Manifest, TensorSpec, compare, tensors_in
from asyncrl.weights.memory import Spare
from asyncrl.weights.shards import Shard
from asyncrl.weights.stored import Stored, folder, hashed, read_stored, with_checksums

OfferKind = TypeVar("OfferKind", bound=FolderOffer)


class FileSender(FolderSender):
    """The learner's side."""

    transport: Transport = "file"

    def _publish(self, image: Image, data: Bytes, recipients: Sequence[Recipient]) -> FolderOffer:
        return self._put(image, data, with_checksums(image.manifest, data), whole=True, more={})

    def _needed(self) -> Collection[Weights]:
        return ()


class FileReceiver:
    """The collector's side."""

    def __init__(self) -> None:
        self._spare = Spare()

    def stage(self, offer: Mapping[str, Any], *, deadline_s: float, verify: bool = True) -> StagedWeights:
        """As `Receiver.stage`. Errors name the file, and where one is at fault the tensor, expected and found."""
        clock = Clock(deadline_s)
        expected = parse_offer(offer, FolderOffer)
        depot = open_depot(expected.url)
        stored = read_stored(depot, expected.weights, expected.manifest_checksum)
        image = self._spare.take(stored.manifest.size).bytes()
        read_whole(depot, stored, image, clock, verify=verify)
        return staged(stored, image, expected.checksum)

    def close(self) -> None:
        """What has been staged stays good."""
        self._spare.drop()


class Clock:
    """How long reading may still take; asked before each piece. A call that never returns is the caller's to give up:
    it runs receivers in threads that can be left behind."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._end = time.monotonic() + limit_s

    def check(self, doing: str) -> None:
        """Raises WeightsLate, naming what was to be read next."""
        if time.monotonic() >= self._end:
            raise WeightsLate(
                f"not read within {self._limit_s:g} s, next was {doing}. Raise weights.deadline_s, or see what is slow"
            )


def parse_offer(offer: Mapping[str, Any], kind: type[OfferKind]) -> OfferKind:
    """The announced offer. Raises WeightsError."""
    try:
        return msgspec.convert(dict(offer), kind)
    except msgspec.ValidationError as error:
        raise WeightsError(f"this is no offer of transport {offer.get('transport')}: {error}") from error


def read_whole(depot: Depot, stored: Stored, into: Bytes, clock: Clock, *, verify: bool) -> None:
    """Fill `into`, uint8 [bytes of the image], from the safetensors files of a version. verify: compare its bytes too.

    Raises WeightsGone (removed), WeightsLate, WeightsError (truncated, damaged, another's).
    """
    for shard in stored.shards:
        name = f"{folder(stored.weights)}/{shard.name}"
        where = f"{depot.url}/{name}"
        try:
            clock.check(where)
            _check_file(depot, name, shard, where)
            at = len(shard.header)
            for spec in shard.tensors:
                content = into[spec.offset : spec.offset + spec.nbytes].data
                for start in range(0, spec.nbytes, PIECE):
                    clock.check(f"{where}, {spec.name}")
                    piece = content[start : start + PIECE]
                    if (found := depot.read(name, at + start, piece)) < len(piece):
                        raise WeightsError(f"{where} ends {len(piece) - found} bytes before {spec.name} does")
                at += spec.nbytes
        except FileNotFoundError as error:
            raise WeightsGone(f"{where} has been removed") from error
        if verify:
            verify_tensors(shard.tensors, into, where)


def verify_tensors(tensors: Sequence[TensorSpec], image: Bytes, where: str) -> None:
    """Compare the bytes with the checksums. Raises WeightsError naming tensors, expected and found."""
    compare(Manifest(tuple(tensors), {}, ""), hashed(tensors, image), where=where)


def staged(stored: Stored, image: Bytes, checksum: str) -> StagedWeights:
    """The tensors in `image`, which is theirs from now on. checksum: of what is served, as published."""
    manifest = stored.manifest
    return StagedWeights(stored.weights, tensors_in(image, manifest), manifest.tied, checksum, adapter=manifest.adapter)


def _check_file(depot: Depot, name: str, shard: Shard, where: str) -> None:
    """The file has the size and begins as the manifest says."""
    size = depot.size(name)
    if size != shard.nbytes:
        raise WeightsError(f"{where} has {size} bytes, expected {shard.nbytes}: it was cut off, or is another's")
    header = bytearray(len(shard.header))
    depot.read(name, 0, memoryview(header))
    if header != shard.header:
        raise WeightsError(f"{where} is not the file that was written for these weights: its header is another")
