"""The HTTP of a server's double: requests with JSON, answers in one piece or as a stream of events."""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any


class HttpDouble:
    """Behind a port of this host while `listening` is open, which has its `url`."""

    def __init__(self) -> None:
        self.url = ""
        self._writers: set[asyncio.StreamWriter] = set()

    @abstractmethod
    async def respond(self, route: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Answer one request, by `answer` or `stream`."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Requests of one connection, one after the other."""
        self._writers.add(writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *headers = head.decode().split("\r\n")
                route = first.split(" ")[1].partition("?")[0]
                lengths = [line.split(":")[1] for line in headers if line.lower().startswith("content-length")]
                body = json.loads(await reader.readexactly(int(lengths[0]))) if lengths and int(lengths[0]) else {}
                await self.respond(route, body, writer)
                await writer.drain()
        self._writers.discard(writer)
        writer.close()

    def answer(self, writer: asyncio.StreamWriter, status: int, content: bytes) -> None:
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)

    async def stream(self, writer: asyncio.StreamWriter, events: AsyncIterator[dict[str, Any]]) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        async for event in events:
            self._chunk(writer, json.dumps(event).encode())
            await writer.drain()
        self._chunk(writer, b"[DONE]")
        writer.write(b"0\r\n\r\n")

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        data = b"data: " + data + b"\n\n"
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def die(self) -> None:
        """All connections break."""
        for writer in self._writers:
            writer.transport.abort()


@asynccontextmanager
async def listening(double: HttpDouble) -> AsyncIterator[None]:
    server = await asyncio.start_server(double.serve, "127.0.0.1", 0)
    double.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield
    finally:
        double.die()
        server.close()
