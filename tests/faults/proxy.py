"""A proxy in front of a real store that loses, delays, resets and cuts off what the store answers.

It reads the protocol (RESP) as far as where a command or an answer ends, so that a fault falls on one request, be it a
command or a whole transaction, and so that the server has surely acted where it should have.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from urllib.parse import urlsplit

CHUNK = 1 << 16
DELAY_S = 0.1


class Fault(StrEnum):
    """What happens to one request."""

    UNSENT = "unsent"  # the connection ends before the server has seen the request
    LOST = "lost"  # the connection ends when the server has answered, before the client has seen anything of it
    RESET = "reset"  # it ends there with a RST, which also throws away what was sent before
    CUT = "cut"  # it ends in the middle of the answer
    DELAYED = "delayed"  # the answer arrives DELAY_S later


class Proxy:
    """Serves `url`; asks `choose` at each request which fault it suffers. `suffered` counts them."""

    def __init__(self, target: str, choose: Callable[[bytes], Fault | None]) -> None:
        self.choose = choose
        self.suffered = dict.fromkeys(Fault, 0)
        self.url = ""
        self._target = urlsplit(target)
        self._server: asyncio.Server | None = None
        self._relays: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relay = asyncio.ensure_future(self._relay(reader, writer))
        self._relays.add(relay)
        relay.add_done_callback(self._relays.discard)

    async def _relay(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        if self._target.scheme == "unix":
            server, to_server = await asyncio.open_unix_connection(self._target.path)
        else:
            server, to_server = await asyncio.open_connection(self._target.hostname, self._target.port)
        requests = asyncio.StreamReader()

        async def pump() -> None:
            """Ends when the client has gone: the server must learn of it although an answer is still to come."""
            while data := await client.read(CHUNK):
                requests.feed_data(data)

        serve = self._serve(requests, to_client, server, to_server)
        ways = [asyncio.ensure_future(pump()), asyncio.ensure_future(serve)]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for writer in (to_client, to_server):
                with suppress(OSError):
                    writer.close()

    async def _serve(
        self,
        requests: asyncio.StreamReader,
        to_client: asyncio.StreamWriter,
        server: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
    ) -> None:
        """One request after the other, until one suffers a fault that ends the connection."""
        while True:
            commands = [await value(requests)]
            if b"MULTI" in commands[0][:20]:
                while b"EXEC" not in commands[-1][:20]:
                    commands.append(await value(requests))
            request = b"".join(commands)
            fault = self.choose(request)
            if fault is not None:
                self.suffered[fault] += 1
            if fault is Fault.UNSENT:
                return
            to_server.write(request)
            answer = b"".join([await value(server) for _ in commands])
            if fault is Fault.DELAYED:
                await asyncio.sleep(DELAY_S)
            elif fault is Fault.CUT:
                answer = answer[: len(answer) // 2]
            if fault in (None, Fault.DELAYED, Fault.CUT):
                to_client.write(answer)
                await to_client.drain()
            if fault is Fault.RESET:
                end_with_reset(to_client)
            if fault in (Fault.LOST, Fault.RESET, Fault.CUT):
                return


async def value(stream: asyncio.StreamReader) -> bytes:
    """The bytes of one RESP value: a command, or an answer."""
    head = await stream.readuntil(b"\r\n")
    kind, rest = head[:1], head[1:-2]
    if kind in b"$=!":  # so many bytes
        return head if rest == b"-1" else head + await stream.readexactly(int(rest) + 2)
    if kind in b"*~>%":  # so many values, or pairs of them
        count = int(rest) * (2 if kind == b"%" else 1)
        return head + b"".join([await value(stream) for _ in range(max(0, count))])
    return head


def end_with_reset(writer: asyncio.StreamWriter) -> None:
    """Make the close that follows send RST instead of FIN: linger is on, for 0 seconds."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@asynccontextmanager
async def proxied(target: str, choose: Callable[[bytes], Fault | None]) -> AsyncIterator[Proxy]:
    """A running proxy in front of the store at `target`."""
    proxy = Proxy(target, choose)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()


def every_other(operation: str, fault: Fault) -> Callable[[bytes], Fault | None]:
    """Each request of this operation suffers the fault, and the repetition that follows does not."""
    wanted = f"${len(operation)}\r\n{operation}\r\n".encode()  # a bulk string of RESP
    turns = itertools.cycle([fault, None])
    return lambda request: next(turns) if wanted in request else None
