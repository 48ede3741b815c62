"""The store's protocol without a client: what a server and a socket allow."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


class Raw:
    """SET and GET by hand: what the server and the socket allow, without a client."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lengths: dict[bytes, int] = {}

    @property
    def keys(self) -> list[bytes]:
        """All that were set."""
        return list(self._lengths)

    def set(self, number: int, value: bytes) -> None:
        key = _key(number)
        self._lengths[key] = len(value)
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(value))
        self._connection.sendall(head)
        self._connection.sendall(value)
        self._connection.sendall(b"\r\n")
        assert self._receive(5) == b"+OK\r\n"

    def get(self, number: int) -> bytes:
        """What was set under this number last."""
        key = _key(number)
        self._connection.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
        length = self._lengths[key]
        head = len(b"$%d\r\n" % length)
        return self._receive(head + length + 2)[head:-2]

    def _receive(self, size: int) -> bytes:
        buffer = bytearray(size)
        view = memoryview(buffer)
        while view:
            view = view[self._connection.recv_into(view) :]
        return bytes(buffer)


def _key(number: int) -> bytes:
    return b"asyncrl:{bench}:raw-%d" % number


@contextmanager
def raw_socket(url: str) -> Iterator[Raw]:
    path = url.removeprefix("unix://").partition("?")[0]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        yield Raw(connection)
