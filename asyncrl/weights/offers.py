"""Offers that carry the manifest of their version: what a receiver reads of an announcement before anything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from asyncrl.staleness import Weights
from asyncrl.weights.base import Transport, WeightsError
from asyncrl.weights.manifest import Manifest, check


class ManifestOffer(msgspec.Struct, frozen=True, kw_only=True):
    """One version over one transport. What else it takes to get it, subclasses add; `str` says where it is."""

    transport: str
    lineage: int
    version: int
    manifest: Manifest

    @property
    def weights(self) -> Weights:
        return Weights(self.lineage, self.version)


OfferKind = TypeVar("OfferKind", bound=ManifestOffer)


def parse_manifest_offer(offer: Mapping[str, Any], kind: type[OfferKind], transport: Transport) -> OfferKind:
    """The announced offer, checked in itself. Raises WeightsError."""
    try:
        parsed = msgspec.convert(dict(offer), kind)
    except msgspec.ValidationError as error:
        raise WeightsError(f"this is no offer of transport {transport}: {error}") from error
    if parsed.transport != transport:
        raise WeightsError(f"this is no offer of transport {transport}, but of {parsed.transport!r}")
    check(parsed.manifest, str(parsed))
    return parsed
