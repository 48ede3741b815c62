"""Weights on their way from the learner to the engines: named, described, checked.

A publisher writes one version and returns a document (JSON-able) that any receiver can find it by; the document goes
through the buffer's `announce`, the bytes never do. A receiver returns tensors only after every one of them was
compared with the manifest; anything missing, extra, reordered, of another shape or type, or with another checksum is
an error, and what is served goes on being served.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from asyncrl.staleness import Weights

if TYPE_CHECKING:
    import torch


class WeightsError(RuntimeError):
    """Weights could not be published, found or verified; names tensor, expected and found."""


class WeightsGone(WeightsError):
    """The version was overwritten while it was read, or is no longer there: take the newest announcement instead."""


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A verified, private copy. `tensors` excludes tied aliases: they follow their source. Order as in the manifest."""

    weights: Weights
    tensors: Mapping[str, torch.Tensor]
    tied: Mapping[str, str]  # alias -> the tensor it is tied to
    checksum: str  # of the whole version: xxh3_64 hex over the tensors' checksums in order


class Publisher(Protocol):
    """The learner's side of one transport."""

    def publish(
        self,
        weights: Weights,
        source: Iterable[tuple[str, torch.Tensor]],
        *,
        tied: Mapping[str, str],
        in_use: set[Weights],
    ) -> dict[str, Any]:
        """Write one version and return its document. `in_use`: versions that live collectors serve or stage; what holds
        them is not overwritten."""

    def close(self) -> None: ...


class Receiver(Protocol):
    """The collector's side. `stage` blocks: call it in a thread."""

    def stage(self, document: Mapping[str, Any], *, deadline_s: float) -> StagedWeights:
        """Copy and verify. Raises WeightsGone (overwritten meanwhile), WeightsError (anything else)."""

    def close(self) -> None: ...
