"""Versions published through the senders that write folders, one after the other, as the learner's outlet has it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from asyncrl.staleness import Weights
from asyncrl.weights.base import Recipient
from asyncrl.weights.folder_sender import FolderSender
from asyncrl.weights.image import Image, Images

Tensors = Sequence[tuple[str, torch.Tensor]]


def recipient(name: str = "a", serving: Weights | None = None, **more: Any) -> Recipient:
    return Recipient(name, "1", None, "file", serving, **more)


def offered(sender: FolderSender, weights: Weights, *, seconds: float = 30.0) -> Mapping[str, Any]:
    """The offer of `weights`, once it is there."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        offer = sender.offer()
        if offer is not None and (offer["lineage"], offer["version"]) == tuple(weights):
            return offer
        time.sleep(0.002)
    raise AssertionError(f"{tuple(weights)} not offered within {seconds} s, but {sender.offer()}")


class Learner:
    """Images of one learner, and a sender that brings them somewhere."""

    def __init__(self, folder: Path, sender: FolderSender) -> None:
        self.images = Images("test", folder=folder)
        self.sender = sender
        self.image: Image | None = None

    def publish(
        self,
        weights: Weights,
        tensors: Tensors,
        *,
        tied: Mapping[str, str] | None = None,
        hashed: bool = True,
        recipients: Iterable[Recipient] = (recipient(),),
    ) -> Mapping[str, Any]:
        """Write a version and have it sent; its offer."""
        self.image = self.images.write(weights, tensors, tied=tied or {}, hashed=hashed)
        self.sender.serve(self.image, tuple(recipients))
        return offered(self.sender, weights)

    def close(self) -> None:
        self.sender.close()
        self.images.close()
