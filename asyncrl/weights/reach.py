"""Which transport a collector uses: a pure decision from where the two sides are, the same on both sides.

>>> a = Place(host="a", memory="17", device="cpu")
>>> choose(a, a, "auto").transport
'shm'
>>> choose(a, Place(host="b", memory="9", device="cpu"), "auto")
Choice(transport='collective', why='learner on a, this collector on b: over the network')
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from asyncrl.weights.base import Transport
from asyncrl.weights.segments import segment_folder

if TYPE_CHECKING:
    import torch


class Place(msgspec.Struct, frozen=True):
    """Where a process is, as far as it decides what it can reach."""

    host: str  # its name, for people
    memory: str  # identity of the shared memory it sees: equal means that a file written by one is seen by the other
    device: str  # "cpu", or the UUID of the GPU it computes on


@dataclass(frozen=True, slots=True)
class Choice:
    """A transport, and why it was chosen: shown by `asyncrl status`."""

    transport: Transport
    why: str
    instead: Transport | None = None  # what reaches as well, should it fail


def here(device: str = "cpu") -> Place:
    """This process's place. Two containers of one host that share no /dev/shm are two places; so are two boots, and two
    users, who may not read each other's files there."""
    folder = segment_folder()
    boot = Path("/proc/sys/kernel/random/boot_id")
    identity = boot.read_text().strip() if boot.is_file() else socket.gethostname()
    found = os.stat(folder)
    return Place(socket.gethostname(), f"{identity}/{folder}/{found.st_dev}/{found.st_ino}/{os.getuid()}", device)


def device_of(device: torch.device) -> str:
    """How `Place` names a device of torch: "cpu", or the UUID of a GPU, whose index differs between processes."""
    if device.type != "cuda":
        return "cpu"
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


def device_named(name: str) -> torch.device | None:
    """The device of this process that `device_of` names so; None: it sees none."""
    import torch

    seen = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]
    return next((device for device in seen if device_of(device) == name), None)


def choose(learner: Place, collector: Place, wanted: Literal["auto"] | Transport) -> Choice:
    """`wanted` is the recipe's `weights.transport`. A transport that is named is taken, whether it can work or not:
    what fails then says why; `auto` takes the fastest that reaches."""
    if wanted != "auto":
        return Choice(wanted, "weights.transport")
    if learner.memory == collector.memory:
        if learner.device == collector.device != "cpu":
            return Choice("cuda-ipc", f"both on GPU {collector.device}", instead="shm")
        return Choice("shm", f"both on {collector.host}, with one shared memory")
    if learner.host == collector.host:
        return Choice(
            "collective", f"both on {learner.host}, but with no shared memory of the same user: over the network"
        )
    return Choice("collective", f"learner on {learner.host}, this collector on {collector.host}: over the network")
