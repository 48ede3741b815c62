"""The sender and the receiver of each transport: the one place that knows them all. What a transport needs is loaded
when it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from asyncrl.config.weights import WeightsConfig
from asyncrl.weights.base import Receiver, Sender, Transport, WeightsError
from asyncrl.weights.delta import DeltaReceiver, DeltaSender
from asyncrl.weights.file import FileReceiver, FileSender
from asyncrl.weights.shm import ShmReceiver


def receiver(offer: Mapping[str, Any], *, me: str = "", device: str = "cpu") -> Receiver:
    """The collector's side of the transport that made `offer`. `me`: the collector's incarnation, by which a roster
    knows it; `device`: as in its `Place`. Raises WeightsError for a transport that this version lacks."""
    transport = offer.get("transport")
    if transport == "shm":
        return ShmReceiver(mapped=True)
    if transport == "file":
        return FileReceiver()
    if transport == "delta":
        return DeltaReceiver()
    if transport == "collective":
        from asyncrl.weights.collective_receiver import CollectiveReceiver

        return CollectiveReceiver(me, device=device)
    if transport == "cuda-ipc":
        from asyncrl.weights.cuda_ipc import CudaIpcReceiver

        return CudaIpcReceiver()
    raise WeightsError(f"weights were published over {transport!r}; this version does not receive over it")


def sender(
    transport: Transport,
    config: WeightsConfig,
    *,
    run: str,
    changed: Callable[[], None],
    store_url: str = "",
    device: str = "cpu",
) -> Sender:
    """The learner's side of `transport`. It calls `changed`, from whatever thread, when its offer is another.
    `store_url`: of the buffer, whose host the collectors reach as well; `device`: as in the learner's `Place`.

    Raises WeightsError: the transport cannot work on this host, or as the recipe has it. May block for seconds.
    """
    if transport in ("file", "delta"):
        # A fallback has a folder of its own, unless the recipe's transport is the same.
        url = config.url if config.transport == transport or config.fallback is None else config.fallback.url
        if url is None:
            raise WeightsError(f"transport {transport} needs weights.url: a folder that all hosts see, or s3://...")
        if transport == "file":
            return FileSender(run, url, deadline_s=config.deadline_s, changed=changed)
        return DeltaSender(run, url, deadline_s=config.deadline_s, changed=changed, anchor_every=config.anchor_every)
    if transport == "collective":
        from asyncrl.weights.collective import CollectiveSender

        return CollectiveSender(
            deadline_s=config.deadline_s,
            toward=urlsplit(store_url).hostname or "127.0.0.1",  # a store without a host is for this one only
            interface=config.interface,
            port=config.port,
            device=device,
            changed=changed,
        )
    if transport == "cuda-ipc":
        from asyncrl.weights.cuda_ipc import CudaIpcSender

        return CudaIpcSender(device=device, deadline_s=config.deadline_s, changed=changed)
    raise WeightsError(f"collectors want their weights over {transport!r}, which this version does not send")
