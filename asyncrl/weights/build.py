"""The sender and the receiver of each transport: the one place that knows them all. What a transport needs is loaded
when it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.config.recipe import WeightsConfig
from asyncrl.weights.base import Receiver, Sender, Transport, WeightsError
from asyncrl.weights.shm import ShmReceiver


def receiver(offer: Mapping[str, Any], *, me: str = "") -> Receiver:
    """The collector's side of the transport that made `offer`. `me`: the collector's incarnation, by which a roster
    knows it. Raises WeightsError for a transport that this version lacks."""
    transport = offer.get("transport")
    if transport == "shm":
        return ShmReceiver()
    raise WeightsError(f"weights were published over {transport!r}; this version receives over 'shm' only")


def sender(transport: Transport, config: WeightsConfig, *, run: str, changed: Callable[[], None]) -> Sender:
    """The learner's side of `transport`. It calls `changed`, from whatever thread, when its offer is another.

    Raises WeightsError: the transport cannot work on this host, or as the recipe has it. May block for seconds.
    """
    raise WeightsError(f"collectors want their weights over {transport!r}, which this version does not send")
