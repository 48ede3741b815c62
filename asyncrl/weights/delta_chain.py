"""Which version a delta is made against, and by which way a receiver comes to a version. Pure: no bytes, no clock.

Versions that deltas are made against are *baselines*. The first is whole; each later one is a version that every
collector is known to have verified, or one that was written whole as well, an *anchor*, which needs no other. A version
that is published is a delta against the newest baseline, so that a collector which missed some needs one delta more,
never all it missed:

    1-0 whole <- 1-1 <- 1-2 <- 1-5          baselines: 1-0 1-1 1-2; everyone verified 1-2, not everyone 1-3 and 1-4
              (1-3 and 1-4 were against 1-2 as well)

Overwrites make it harmless to apply a delta again; a receiver still applies each to its base only, since an element
that changed and changed back is in neither delta against a common base.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from asyncrl.staleness import Weights
from asyncrl.weights.base import Recipient, WeightsError


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One version in a folder of files, whole or as a delta, or both."""

    lineage: int
    version: int
    manifest_checksum: str  # xxh3_64 hex of its manifest.json
    whole_bytes: int = 0  # of its tensors; 0: it is not there whole
    base: Weights | None = None  # what its delta is against; None: it has none
    delta_bytes: int = 0
    delta_checksum: str = ""  # xxh3_64 hex of delta.bin

    @property
    def weights(self) -> Weights:
        return Weights(self.lineage, self.version)

    @property
    def is_whole(self) -> bool:
        return self.base is None or self.whole_bytes > 0


class Way(NamedTuple):
    """How to come to a version: begin with `whole` (None: with what the receiver has), then apply `deltas` in order."""

    whole: Link | None
    deltas: tuple[Link, ...]

    @property
    def nbytes(self) -> int:
        """To be fetched."""
        return (self.whole.whole_bytes if self.whole else 0) + sum(link.delta_bytes for link in self.deltas)


def way_to(chain: Sequence[Link], kept: Link | None) -> Way:
    """The way of fewest bytes to the last of `chain`, from `kept`, which may be in it, or from a whole version.

    Raises WeightsError: neither leads there, so the chain was not written by `Chain`.
    """
    links = {link.weights: link for link in chain}
    link, deltas, ways = chain[-1], tuple[Link, ...](), list[Way]()
    while True:
        if link == kept:
            ways.append(Way(None, deltas))
            break
        if link.is_whole:
            ways.append(Way(link, deltas))
        base = None if link.base is None else links.get(link.base)
        if base is None or base.weights >= link.weights:
            break
        link, deltas = base, (link, *deltas)
    if not ways:
        raise WeightsError(f"no whole version leads to {tuple(chain[-1].weights)}, only {len(deltas)} deltas")
    return min(ways, key=lambda way: way.nbytes)


@dataclass
class Chain:
    """The learner's side. The baselines since the last anchor but one, oldest first, and what was published since."""

    anchor_every: int  # publications
    baselines: list[Link] = field(default_factory=list)
    candidates: list[Link] = field(default_factory=list)  # against the newest baseline, oldest first
    since_anchor: int = 0  # publications

    @property
    def baseline(self) -> Link | None:
        """What the next delta is made against; None: the next version must be whole."""
        return self.baselines[-1] if self.baselines else None

    @property
    def anchor_is_due(self) -> bool:
        return not self.baselines or self.since_anchor + 1 >= self.anchor_every

    def advance(self, recipients: Iterable[Recipient]) -> Link | None:
        """Move the baseline to the newest publication that all `recipients` have verified; None: it stays."""
        reached = [verified(recipient) for recipient in recipients]
        ready = [link for link in self.candidates if all(has is not None and has >= link.weights for has in reached)]
        if not reached or not ready:
            return None
        # What was published later stays readable, but is against an older baseline: no way leads on from it.
        self.baselines.append(ready[-1])
        self.candidates = []
        return ready[-1]

    def published(self, link: Link) -> tuple[Link, ...]:
        """Take note of a version that is durably written; returns the chain that leads to it."""
        if link.is_whole:
            self.baselines.append(link)
            self.candidates = []
            self.since_anchor = 0
            wholes = [i for i, baseline in enumerate(self.baselines) if baseline.is_whole]
            del self.baselines[: wholes[-2] if len(wholes) > 1 else 0]
            return tuple(self.baselines)
        self.candidates.append(link)
        self.since_anchor += 1
        return (*self.baselines, link)


def verified(recipient: Recipient) -> Weights | None:
    """The newest weights that a collector has verified: those it serves, or has staged."""
    if recipient.phase in ("activate", "verify") and recipient.weights is not None:
        return recipient.weights
    return recipient.serving
