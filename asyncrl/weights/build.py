"""Which receiver takes an offer: the one place that knows all transports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.weights.base import Receiver, WeightsError
from asyncrl.weights.shm import ShmReceiver


def receiver(offer: Mapping[str, Any]) -> Receiver:
    """The collector's side of the transport that made `offer`. Raises WeightsError for one this version lacks."""
    transport = offer.get("transport")
    if transport == "shm":
        return ShmReceiver()
    raise WeightsError(f"weights were published over {transport!r}; this version receives over 'shm' only")
