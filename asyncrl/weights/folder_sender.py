"""What `file` and `delta` have in common on the learner's side: versions are written into folders of files."""

from __future__ import annotations

import logging
import secrets
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import msgspec
import xxhash

from asyncrl.staleness import Weights
from asyncrl.weights.base import Recipient, Transport, WeightsError
from asyncrl.weights.delta_codec import Bytes
from asyncrl.weights.depot import COMMIT, DRAFT, Parts, open_depot
from asyncrl.weights.image import Image
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.newest_sender import NewestSender
from asyncrl.weights.shards import INDEX, Shard, index
from asyncrl.weights.stored import KEEP, LATEST, OURS, Stored, folder, parse_folder, removable

logger = logging.getLogger(__name__)


class FolderOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Where a version lies. The manifest is too large to announce: its hash is, which makes it as good."""

    transport: Transport
    lineage: int
    version: int
    url: str  # of the run's folder
    checksum: str  # of what is served, as published; "" where it was published without
    nbytes: int  # of all tensors
    manifest_checksum: str  # xxh3_64 hex of the bytes of manifest.json

    @property
    def weights(self) -> Weights:
        return Weights(self.lineage, self.version)

    def __str__(self) -> str:
        return f"weights {tuple(self.weights)} in {self.url}/{folder(self.weights)}"


class FolderSender(NewestSender):
    """A `Sender` that writes under URL/RUN. What it has written stays when it is closed, for whoever goes on with this
    run or evaluates it."""

    def __init__(self, run: str, url: str, *, deadline_s: float, changed: Callable[[], None]) -> None:
        """As `NewestSender`. Raises WeightsError: nothing can be written there."""
        self._writer = secrets.token_hex(8)
        self._run = run
        self._depot = open_depot(f"{url.rstrip('/')}/{run}", writer=self._writer)
        self._depot.prepare()
        self._written: list[Weights] = []  # what this sender has written, oldest first
        self._strangers: set[str] | None = None  # versions of this lineage that others wrote; None: not looked yet
        super().__init__(self._depot.url, deadline_s=deadline_s, changed=changed)

    @abstractmethod
    def _needed(self) -> Collection[Weights]:
        """The versions that the announced offer needs besides its own."""

    def _put(
        self, image: Image, data: Bytes, manifest: Manifest, *, whole: bool, more: Mapping[str, Parts]
    ) -> FolderOffer:
        """Write one version's folder: its tensors if `whole`, the files `more`, its manifest.json.

        manifest: the image's, with checksums.
        """
        stored = Stored(
            run=self._run, writer=self._writer, lineage=image.weights.lineage, version=image.weights.version,
            whole=whole, manifest=manifest,
        )  # fmt: skip
        files: dict[str, Parts] = {}
        if whole:
            shards = stored.shards
            files |= {shard.name: self._content(data, shard) for shard in shards}
            self._bytes += sum(shard.nbytes for shard in shards)
            if len(shards) > 1:
                files[INDEX] = [index(shards)]
        if self._depot.names(folder(image.weights)):  # from a try that broke off, or a run that crashed
            self._remove(folder(image.weights))
        encoded = stored.encoded()
        files |= {**more, COMMIT: [encoded]}
        self._depot.put(folder(image.weights), files)
        self._bytes += len(encoded)
        self._written.append(image.weights)
        self._point(image.weights)
        return FolderOffer(
            transport=self.transport,
            lineage=image.weights.lineage,
            version=image.weights.version,
            url=self._depot.url,
            checksum=image.manifest.served,
            nbytes=manifest.nbytes,
            manifest_checksum=xxhash.xxh3_64_hexdigest(encoded),
        )

    def _content(self, data: Bytes, shard: Shard) -> Iterator[bytes | memoryview]:
        yield shard.header
        for spec in shard.tensors:
            if self._closed:
                raise WeightsError("the learner ends")
            yield data[spec.offset : spec.offset + spec.nbytes].data

    def _point(self, weights: Weights) -> None:
        """LATEST says what is newest. It never goes back: a learner that was replaced may still be writing."""
        try:
            found = parse_folder(self._depot.content(LATEST).decode(errors="replace").strip())
        except FileNotFoundError:
            found = None
        if found is None or found.lineage <= weights.lineage:
            self._depot.replace(LATEST, folder(weights).encode() + b"\n")

    def _published(self, newest: Weights, recipients: Sequence[Recipient]) -> None:
        """Remove what nobody needs. With the first version of this sender also what a run of this name left behind when
        it crashed; what comes later under this lineage is another learner's."""
        try:
            names = self._depot.names()
            if self._strangers is None:
                for name in names:
                    if name.startswith(DRAFT):
                        self._remove(name)
            for name in removable(names, self._written[-KEEP:], recipients, self._needed()):
                if self._strangers is None or parse_folder(name) in self._written:
                    self._remove(name)
            others = {
                name
                for name in (self._depot.names() if self._strangers is None else names)
                if (found := parse_folder(name)) and found.lineage == newest.lineage and found not in self._written
            }
            if self._strangers is not None and (new := sorted(others - self._strangers)):
                logger.error(
                    "%s: another learner writes lineage %d of a run of this name there: %s; each run needs a "
                    "weights.url, or a name, of its own", self._depot.url, newest.lineage, ", ".join(new),
                )  # fmt: skip
            self._strangers = others | (self._strangers or set())
        except (WeightsError, OSError) as error:
            logger.warning("old weights in %s cannot be removed: %s", self._depot.url, error)

    def _remove(self, name: str) -> None:
        if name.endswith(LATEST):
            self._depot.remove("", [name])
        elif not self._depot.remove(name, filter(OURS.fullmatch, self._depot.names(name))):
            logger.warning("%s/%s stays: there is more in it than weights", self._depot.url, name)
