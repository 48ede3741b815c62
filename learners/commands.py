"""What rank 0 tells the other ranks to do, as JSON: no pickle anywhere."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from asyncrl.buffers.base import Lease


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Load what rank 0 has loaded: the initial weights, or those of a checkpoint.

    identity: of its recipe (`config/identity.py`). run_dir: of the run. checkpoint: its folder; digest: xxh3 of its
    manifest.
    """

    identity: dict[str, Any]
    run_dir: str
    checkpoint: str | None = None
    digest: str = ""


class Train(msgspec.Struct, frozen=True, tag="train"):
    """Train a step. shares[update][rank]: which of the lease's groups, by their place in it."""

    lease: Lease
    shares: list[list[list[int]]]


class Gather(msgspec.Struct, frozen=True, tag="gather"):
    """Give rank 0 the parts of the weights, to be saved or as they are served, or of the optimizer's state and random
    numbers."""

    what: Literal["weights", "served", "optimizer"]


class End(msgspec.Struct, frozen=True, tag="end"):
    """Training is over."""


Command = Begin | Train | Gather | End

_decoder = msgspec.json.Decoder(Command)


def encoded(command: Command) -> bytes:
    """For `decoded`."""
    return msgspec.json.encode(command)


def decoded(content: bytes) -> Command:
    """What `encoded` was given."""
    command: Command = _decoder.decode(content)
    return command
