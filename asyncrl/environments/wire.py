"""What the processes of episodes say to each other: MessagePack, by the frames of `asyncrl.rewards.worker`.

                commands, events (one packet each)
collector <---------------------------------------------> zygote
    |                                                        | forks, or starts anew
    |           calls, replies (a stream for each episode)   v
    +----------------------------------------------------> child
"""

from __future__ import annotations

import socket
from typing import Any, Literal

import msgspec

PACKET_BYTES = 65536  # of a command or event, which have a few dozen
LARGEST_REPLY = 16 << 20
"""Bytes of what a child may answer: far above any context, far below what would stop a collector."""


class Begin(msgspec.Struct, tag=True):
    """A child is to be made. With it come two descriptors: its end of the stream, and where its output goes."""

    id: int
    seed: int


class End(msgspec.Struct, tag=True):
    """A child is to be killed, with all that it started."""

    id: int


class Built(msgspec.Struct, tag=True):
    """The zygote can make children. threads: it has several, and forking could hang; children start anew."""

    threads: int
    error: str = ""  # it will never be able to


class Ended(msgspec.Struct, tag=True):
    """A child is gone, and nothing of what it started is left. status: as `os.waitstatus_to_exitcode` has it."""

    id: int
    status: int


class NotBegun(msgspec.Struct, tag=True):
    """No child could be made."""

    id: int
    error: str


Command = Begin | End
Event = Built | Ended | NotBegun


class Ready(msgspec.Struct):
    """The first message of a child."""

    error: str = ""  # it cannot build what it is to call


class Call(msgspec.Struct, array_like=True):
    """A method of what the factory returned."""

    method: str
    arguments: list[Any]


class Reply(msgspec.Struct, array_like=True):
    """value: what it returned. fault "raised": an exception; "invalid": what cannot be sent or used."""

    value: Any = None
    fault: Literal["", "raised", "invalid"] = ""
    detail: str = ""


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of the way for commands and events: whole packets, and an end when either side is gone."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
