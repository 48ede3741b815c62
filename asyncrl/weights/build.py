"""Which transport carries the weights: the one place that knows them all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.config.recipe import WeightsConfig
from asyncrl.weights.base import Publisher, Receiver, WeightsError
from asyncrl.weights.shm import ShmPublisher, ShmReceiver


def publisher(config: WeightsConfig, run: str) -> Publisher:
    """The learner's side. `auto` is `shm`: learner and collectors share a host."""
    return ShmPublisher(run)


def receiver(document: Mapping[str, Any]) -> Receiver:
    """The collector's side of the transport that wrote `document`. Raises WeightsError for one this version lacks."""
    transport = document.get("transport")
    if transport == "shm":
        return ShmReceiver()
    raise WeightsError(f"weights were published over {transport!r}; this version receives over 'shm' only")
