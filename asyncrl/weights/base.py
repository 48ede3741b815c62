"""Weights on their way from the learner to the engines: named, described, checked.

The learner writes each version once, as an *image*: its tensors as flat bytes in memory that this host's processes
share (`image.py`). Training goes on as soon as it is written. What takes an image further is a `Sender`, one per
transport, in a thread of its own; a collector fetches it with the `Receiver` of that transport. What is to be had where
goes through the buffer's `announce` as a document; the bytes never do:

    {"lineage": 1, "version": 7, "fork": {...},          # the newest weights, and where their lineage forked
     "place": {...},                                     # the learner's `Place`: who can reach it, and how
     "checksums": {"1/7": "9c0f...", "1/6": ...},        # of the last versions, to compare what is served with
     "offers": [{"transport": "shm", "lineage": 1, "version": 7, ...},     # at most one a transport, each of which may
                {"transport": "file", "lineage": 1, "version": 5, ...}]}   # lag: versions skip, they never mix

A receiver returns tensors only after they were compared with the manifest; anything missing, extra, reordered, of
another shape or type, or with another checksum is an error, and what is served goes on being served. Weights travel
in four phases, each with a deadline of `weights.deadline_s`; who is late is named with the phase and since when.

| phase    | begins                                 | ends                                        | who is late       |
|----------|----------------------------------------|---------------------------------------------|-------------------|
| announce | a document says that there are weights | the collector begins to fetch them          | collector, sender |
| stage    | the collector begins to fetch          | its private or mapped copy is complete      | collector, sender |
| activate | staged                                 | the engine samples from them                | engine            |
| verify   | staged or activated, where it is due   | what is served hashes to what was published | engine            |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from asyncrl.staleness import Weights

if TYPE_CHECKING:
    import torch

    from asyncrl.weights.image import Image
    from asyncrl.weights.manifest import Adapter
    from asyncrl.weights.reach import Place

WeightsPhase = Literal["announce", "stage", "activate", "verify"]

Transport = Literal["cuda-ipc", "shm", "collective", "delta", "file"]


class WeightsError(RuntimeError):
    """Weights could not be published, found or verified; names tensor, expected and found."""


class WeightsGone(WeightsError):
    """The version was overwritten while it was read, or is no longer there: take the newest announcement instead."""


class WeightsLate(WeightsError):
    """A phase did not end within its deadline; names who, which phase, and since when."""


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """Verified weights. `tensors` excludes tied aliases: they follow their source. Order as in the manifest. Of an
    adapter they are its factors, and `checksum` is of what comes of them.

    `mapped`: the tensors lie in memory that the publisher wrote and others may read too: they must not be written to.
    Either way that memory is theirs until the last of them is gone. `offer`: with it another process of this host can
    map them as well, for as long as they are not gone here.
    """

    weights: Weights
    tensors: Mapping[str, torch.Tensor]
    tied: Mapping[str, str]  # alias -> the tensor it is tied to
    checksum: str  # of the whole version: xxh3_64 hex over the tensors' checksums in order; "" = published unhashed
    mapped: bool = False
    offer: Mapping[str, Any] | None = None  # of transport shm
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class Recipient:
    """A collector as the learner sees it, by its last beat."""

    name: str
    incarnation: str
    place: Place | None  # None: it has not said
    transport: Transport | None  # the one it has chosen; None: not yet
    serving: Weights | None
    weights: Weights | None = None  # on their way to it
    phase: WeightsPhase | None = None  # they are in; None with weights: they wait for an evaluation or for requests
    since: float = 0.0  # unix seconds, by its own clock; when that phase began


@dataclass(frozen=True, slots=True)
class Late:
    """A collector that did not end a phase within the deadline."""

    member: str
    weights: Weights
    phase: WeightsPhase
    since: float  # unix seconds


class Sender(Protocol):
    """The learner's side of one transport: brings images to those who chose it. Never blocks its caller: what takes
    time runs in the sender's own thread, and while it is busy the newest image takes the place of one that waits."""

    transport: Transport

    def serve(self, image: Image, recipients: Sequence[Recipient]) -> None:
        """There is a new image, or other recipients (those alive that chose this transport). Called for every
        publication and at every look at the members; doing nothing is right if nothing is new."""

    def offer(self) -> Mapping[str, Any] | None:
        """What can be announced now, JSON-able: `transport`, `lineage`, `version` and how to get it. None: nothing."""

    def late(self) -> Sequence[Late]:
        """Who did not keep a deadline since the last call."""

    def measured(self) -> Mapping[str, float]:
        """What it has cost so far, for the metric `weights/sent`: `bytes` sent or written, `seconds` that took, and
        numbers of its own (`telemetry.names`). Sums since the start, or of the last version."""

    def close(self) -> None:
        """End the thread, within seconds, and remove what nobody can use any more."""


class Receiver(Protocol):
    """The collector's side of one transport. `stage` blocks: call it in a thread, one call at a time."""

    def stage(self, offer: Mapping[str, Any], *, deadline_s: float, verify: bool = True) -> StagedWeights:
        """Fetch and verify what `offer` says. verify: compare all bytes with the manifest's checksums, where it has
        some; else only names, order, shapes, types and that nothing is torn.

        Raises WeightsGone (overwritten or removed meanwhile), WeightsLate (the deadline), WeightsError (anything else).
        """

    def close(self) -> None: ...
