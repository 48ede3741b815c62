"""What `file` and `delta` have in common on the learner's side: a thread that writes versions into folders of files.

The newest image wins: while one is written, the newest of those that follow waits. A version that cannot be written is
tried again with the next look at the members; what was announced before goes on being announced.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from asyncrl.staleness import Weights
from asyncrl.weights.base import Late, Recipient, Transport, WeightsError, WeightsGone
from asyncrl.weights.delta_codec import Bytes
from asyncrl.weights.depot import COMMIT, DRAFT, Parts, open_depot
from asyncrl.weights.image import Image
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.shards import INDEX, Shard, index
from asyncrl.weights.stored import KEEP, LATEST, OURS, Stored, folder, parse_folder, removable

logger = logging.getLogger(__name__)

RETRY_S = 5.0
"""After a version could not be written: a full disk may be emptied, a store may come back."""

CLOSE_S = 10.0
"""For what is being written when the learner ends; then the thread is left behind, and a draft with it."""


class FolderOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Where a version lies. The manifest is too large to announce: its hash is, which makes it as good."""

    transport: Transport
    lineage: int
    version: int
    url: str  # of the run's folder
    checksum: str  # of the version as published; "" where it was published without
    nbytes: int  # of all tensors
    manifest_checksum: str  # xxh3_64 hex of the bytes of manifest.json

    @property
    def weights(self) -> Weights:
        return Weights(self.lineage, self.version)

    def __str__(self) -> str:
        return f"weights {tuple(self.weights)} in {self.url}/{folder(self.weights)}"


class FolderSender(ABC):
    """A `Sender` that writes under URL/RUN."""

    transport: Transport

    def __init__(self, run: str, url: str, *, deadline_s: float, changed: Callable[[], None]) -> None:
        """deadline_s: a version that takes longer to write is late. changed: called in the thread when there is another
        offer. Raises WeightsError: nothing can be written there."""
        self._writer = secrets.token_hex(8)
        self._run, self._deadline_s, self._changed = run, deadline_s, changed
        self._depot = open_depot(f"{url.rstrip('/')}/{run}", writer=self._writer)
        self._depot.prepare()
        self._written: list[Weights] = []  # what this sender has written, oldest first
        self._strangers: set[str] | None = None  # versions of this lineage that others wrote; None: not looked yet
        self._bytes, self._seconds = 0, 0.0
        # Shared with the thread, under the condition:
        self._condition = threading.Condition()
        self._recipients: tuple[Recipient, ...] = ()
        self._waiting: Image | None = None
        self._taken: Weights | None = None  # the newest the thread was given
        self._began: tuple[Weights, float] | None = None  # being written, or failing, since (unix seconds)
        self._said: Weights | None = None  # the last that was late
        self._offer: FolderOffer | None = None
        self._retry_at = 0.0  # monotonic
        self._broken: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run_thread, name=f"weights-{self.transport}", daemon=True)
        self._thread.start()

    def serve(self, image: Image, recipients: Sequence[Recipient]) -> None:
        """As `Sender.serve`. Raises what ended the thread, if anything did: a fault of this code."""
        with self._condition:
            if self._broken is not None:
                raise self._broken
            self._recipients = tuple(recipients)
            is_new = self._taken is None or image.weights > self._taken
            if recipients and is_new and time.monotonic() >= self._retry_at:
                self._waiting = image
                self._condition.notify()

    def offer(self) -> Mapping[str, Any] | None:
        with self._condition:
            offer = self._offer
        if offer is None:
            return None
        result: dict[str, Any] = msgspec.to_builtins(offer)
        return result

    def late(self) -> Sequence[Late]:
        """The learner itself, once for each version that it does not bring out in time. A collector that is slow to
        fetch one keeps nobody waiting and says so in its own beats."""
        with self._condition:
            if self._began is None or not self._recipients:
                return ()
            weights, since = self._began
            if weights == self._said or time.time() - since < self._deadline_s:
                return ()
            self._said = weights
        return (Late("learner", weights, "announce", since),)

    def measured(self) -> Mapping[str, float]:
        """`bytes` and `seconds` of all versions written."""
        return {"bytes": self._bytes, "seconds": self._seconds}

    def close(self) -> None:
        """The versions stay: they are of use to whoever goes on with this run, or evaluates it."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning(
                "%s does not answer: a version that was being written is left there unfinished", self._depot.url
            )

    # --- in the thread ------------------------------------------------------------------------------------------------

    @abstractmethod
    def _publish(self, image: Image, data: Bytes, recipients: Sequence[Recipient]) -> FolderOffer:
        """Write a version; what can be announced of it. Raises WeightsError or OSError."""

    @abstractmethod
    def _needed(self) -> Collection[Weights]:
        """The versions that the announced offer needs besides its own."""

    def _run_thread(self) -> None:
        try:
            while (taken := self._next()) is not None:
                self._try(*taken)
        except Exception as error:
            logger.exception("the thread that writes weights to %s ended", self._depot.url)
            with self._condition:
                self._broken = error

    def _next(self) -> tuple[Image, tuple[Recipient, ...]] | None:
        """The newest image that waits; None: closed. Idle until `serve` or `close` notifies."""
        with self._condition:
            self._condition.wait_for(lambda: self._closed or self._waiting is not None)
            image, self._waiting = self._waiting, None
            if self._closed or image is None:
                return None
            self._taken = image.weights
            self._began = (image.weights, time.time() if self._began is None else self._began[1])
            return image, self._recipients

    def _try(self, image: Image, recipients: tuple[Recipient, ...]) -> None:
        started = time.perf_counter()
        try:
            image.retain()
            try:
                offer = self._publish(image, image.data(), recipients)
            finally:
                image.release()
        except WeightsGone:
            return  # a newer image took its place before this one was begun
        except (WeightsError, OSError) as error:
            if self._closed:
                return
            logger.error("weights %s cannot be brought to %s: %s", tuple(image.weights), self._depot.url, error)
            with self._condition:
                self._taken = None if self._offer is None else self._offer.weights
                self._retry_at = time.monotonic() + RETRY_S
            return
        self._seconds += time.perf_counter() - started
        with self._condition:
            self._offer, self._began = offer, None
        self._changed()
        self._tidy(image.weights, recipients)

    def _put(self, image: Image, data: Bytes, manifest: Manifest, *, whole: bool, more: Mapping[str, Parts]) -> str:
        """Write one version's folder: its tensors if `whole`, the files `more`, its manifest.json, of which the xxh3_64
        is returned. manifest: the image's, with checksums."""
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
        return xxhash.xxh3_64_hexdigest(encoded)

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

    def _tidy(self, newest: Weights, recipients: Sequence[Recipient]) -> None:
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
