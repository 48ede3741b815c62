"""Transport `delta`: what `file` writes, but of most versions only the elements that changed.

At learning rates of 1e-6 an update moves about one bfloat16 in a hundred, and a version is 50 times smaller. It pays
where bytes are dear: many collectors, a slow link, an object store. Where too much changes, versions are written whole.
Which version a delta is against, and how a collector comes to a version: `delta_chain.py`; its bytes: `delta_codec.py`.

Both sides hold one more copy of the model in memory: the baseline. What a receiver has put together is always compared
with the manifest's checksums, whatever the recipe says of verification: a base that is not what it should be is then
found, dropped, and the newest whole version taken.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash

from asyncrl.staleness import Weights
from asyncrl.weights.base import Recipient, StagedWeights, Transport, WeightsError, WeightsGone, WeightsLate
from asyncrl.weights.delta_chain import Chain, Link, Way, way_to
from asyncrl.weights.delta_codec import Bytes, Delta, Extent, apply, encode
from asyncrl.weights.depot import Depot, Parts, open_depot
from asyncrl.weights.file import Clock, parse_offer, read_whole, staged, verify_tensors
from asyncrl.weights.folder_sender import FolderOffer, FolderSender
from asyncrl.weights.image import Image
from asyncrl.weights.manifest import DTYPES, Form, Manifest
from asyncrl.weights.memory import Spare
from asyncrl.weights.stored import DELTA, folder, read_stored, with_checksums

logger = logging.getLogger(__name__)


class DeltaOffer(FolderOffer, frozen=True, kw_only=True):
    """A version, and the versions that lead to it, oldest first and itself last."""

    chain: tuple[Link, ...]


class DeltaSender(FolderSender):
    """The learner's side."""

    transport: Transport = "delta"

    def __init__(
        self, run: str, url: str, *, deadline_s: float, anchor_every: int, changed: Callable[[], None]
    ) -> None:
        """anchor_every: every so many publications one is written whole as well."""
        self._chain = Chain(anchor_every)
        self._base: Bytes | None = None  # the bytes of the chain's baseline
        self._forms: list[Form] = []  # of its tensors
        # The versions that the last offers need: until a new one is announced, what was announced before is.
        self._offered: deque[tuple[Weights, ...]] = deque(maxlen=2)
        self._density, self._encode_s, self._wholes, self._deltas = 1.0, 0.0, 0, 0
        super().__init__(run, url, deadline_s=deadline_s, changed=changed)

    def measured(self) -> Mapping[str, float]:
        """Besides `bytes` and `seconds`: of the last version the share of elements that changed since its baseline (1:
        too many, or there is none) and the seconds it took to find and encode them; how many versions were written
        whole, and how many as deltas, which an anchor is both."""
        return {
            **super().measured(),
            "density": self._density,
            "encode_seconds": self._encode_s,
            "whole": self._wholes,
            "deltas": self._deltas,
        }

    def _publish(self, image: Image, data: Bytes, recipients: Sequence[Recipient]) -> DeltaOffer:
        manifest = with_checksums(image.manifest, data)
        self._advance(recipients)
        baseline, delta = self._chain.baseline, self._encode(data, manifest)
        whole = delta is None or self._chain.anchor_is_due
        more: dict[str, Parts] = {} if delta is None else {DELTA: delta.parts}
        offer = self._put(image, data, manifest, whole=whole, more=more)
        link = Link(
            lineage=image.weights.lineage,
            version=image.weights.version,
            manifest_checksum=offer.manifest_checksum,
            whole_bytes=manifest.nbytes if whole else 0,
            base=None if delta is None or baseline is None else baseline.weights,
            delta_bytes=0 if delta is None else delta.nbytes,
            delta_checksum="" if delta is None else delta.checksum,
        )
        chain = self._chain.published(link)
        if whole:
            if self._base is None or self._base.size != data.size:
                self._base = np.empty(data.size, np.uint8)
            np.copyto(self._base, data)
            self._forms = _forms(manifest)
        self._wholes += whole
        self._deltas += delta is not None
        self._bytes += link.delta_bytes
        self._offered.append(tuple(link.weights for link in chain))
        return DeltaOffer(**msgspec.structs.asdict(offer), chain=chain)

    def _needed(self) -> Collection[Weights]:
        return {link.weights for link in self._chain.candidates}.union(*self._offered)

    def _encode(self, data: Bytes, manifest: Manifest) -> Delta | None:
        """The delta against the baseline; None where there is none, or the version is better written whole."""
        started = time.perf_counter()
        self._density, self._encode_s = 1.0, 0.0
        if self._base is None or self._chain.baseline is None or self._forms != _forms(manifest):
            return None
        extents = [Extent(spec.offset, spec.nbytes, DTYPES[spec.dtype].itemsize) for spec in manifest.tensors]
        delta = encode(self._base, data, extents)
        self._encode_s = time.perf_counter() - started
        if delta is not None:
            self._density = delta.density
        return delta

    def _advance(self, recipients: Sequence[Recipient]) -> None:
        """Bring the baseline forward, where all recipients have: by the file that they took it from."""
        link = self._chain.advance(recipients)
        if link is None or self._base is None:
            return
        try:
            _apply(_read_delta(self._depot, link), self._base, f"{self._depot.url}/{folder(link.weights)}/{DELTA}")
        except (WeightsError, FileNotFoundError) as error:
            logger.warning("the next weights are written whole: %s", error)
            self._chain, self._base = Chain(self._chain.anchor_every), None


class DeltaReceiver:
    """The collector's side. Keeps one version of its own, by which later deltas are read."""

    def __init__(self) -> None:
        self._spare = Spare()
        self._kept: tuple[Link, Bytes] | None = None
        self._last: tuple[str, bytes] | None = (
            None  # checksum and bytes of the delta read last: it leads on from `_kept`
        )

    def stage(self, offer: Mapping[str, Any], *, deadline_s: float, verify: bool = True) -> StagedWeights:
        """As `Receiver.stage`; the bytes are compared even without `verify`."""
        expected = parse_offer(offer, DeltaOffer)
        last = expected.chain[-1] if expected.chain else None
        if last is None or (last.weights, last.manifest_checksum) != (expected.weights, expected.manifest_checksum):
            raise WeightsError(f"{expected}: its chain of {len(expected.chain)} versions does not end with it")
        return self._fetch(expected, Clock(deadline_s))

    def close(self) -> None:
        """Give the memory back."""
        self._kept = self._last = None
        self._spare.drop()

    def _fetch(self, expected: DeltaOffer, clock: Clock) -> StagedWeights:
        depot = open_depot(expected.url)
        stored = read_stored(depot, expected.weights, expected.manifest_checksum)
        way = way_to(expected.chain, self._kept[0] if self._kept else None)
        while True:
            try:
                image = self._follow(way, depot, clock)
                if image.size != stored.manifest.size:
                    raise WeightsError(f"{expected}: {image.size} bytes came of it, expected {stored.manifest.size}")
                verify_tensors(stored.manifest.tensors, image, str(expected))
            except (WeightsGone, WeightsLate):
                raise
            except WeightsError as error:
                self._kept = self._last = None
                if way.whole is not None:
                    raise
                logger.warning("%s; beginning again with a whole version", error)
                way = way_to(expected.chain, None)
            else:
                return staged(stored, image, expected.checksum)

    def _follow(self, way: Way, depot: Depot, clock: Clock) -> Bytes:
        """A copy of the version that `way` leads to. What is kept is then the version before it, or itself if that is
        whole: the next one will be against a version that all have, and that is seldom the newest."""
        if way.whole is not None:
            self._kept = None
            stored = read_stored(depot, way.whole.weights, way.whole.manifest_checksum)
            image: Bytes = np.empty(stored.manifest.size, np.uint8)
            read_whole(depot, stored, image, clock, verify=True)
            self._kept = (way.whole, image)
        assert self._kept is not None  # way_to found it in the chain
        for link in way.deltas[:-1]:
            content, (_, image) = self._delta(depot, link, clock), self._kept
            self._kept = None  # as long as it is between two versions
            _apply(content, image, f"{depot.url}/{folder(link.weights)}/{DELTA}")
            self._kept = (link, image)
        result = self._spare.take(self._kept[1].size).bytes()[: self._kept[1].size]
        np.copyto(result, self._kept[1])
        for link in way.deltas[-1:]:
            _apply(self._delta(depot, link, clock), result, f"{depot.url}/{folder(link.weights)}/{DELTA}")
        return result

    def _delta(self, depot: Depot, link: Link, clock: Clock) -> bytes:
        where = f"{depot.url}/{folder(link.weights)}/{DELTA}"
        clock.check(where)
        if self._last is None or self._last[0] != link.delta_checksum:
            try:
                self._last = (link.delta_checksum, _read_delta(depot, link))
            except FileNotFoundError as error:
                raise WeightsGone(f"{where} has been removed") from error
        return self._last[1]


def _read_delta(depot: Depot, link: Link) -> bytes:
    """Raises FileNotFoundError; WeightsError: damaged."""
    name = f"{folder(link.weights)}/{DELTA}"
    content = depot.content(name)
    found = xxhash.xxh3_64_hexdigest(content)
    if (len(content), found) != (link.delta_bytes, link.delta_checksum):
        raise WeightsError(
            f"{depot.url}/{name}: expected {link.delta_bytes} bytes of xxh3 {link.delta_checksum}, found "
            f"{len(content)} of {found}: it was cut off or damaged, or is another's"
        )
    return content


def _apply(content: bytes, image: Bytes, where: str) -> None:
    try:
        apply(content, image)
    except ValueError as error:
        raise WeightsError(f"{where}: {error}") from error


def _forms(manifest: Manifest) -> list[Form]:
    return [spec.form for spec in manifest.tensors]
