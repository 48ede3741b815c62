"""A process that sends back what it gets: the floor of every round trip on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import TracebackType

SERVE = """
import socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
print("ready", flush=True)
connection, _ = server.accept()
while data := connection.recv(65536):
    connection.sendall(data)
"""


class EchoServer:
    """Serves one connection at the unix socket `path` while the context is open."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __enter__(self) -> EchoServer:
        self._process = subprocess.Popen([sys.executable, "-c", SERVE, self.path], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
