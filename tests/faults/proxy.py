"""A proxy in front of a real store that loses, delays, resets and cuts off what the store answers.

It passes bytes on without understanding them. A client of the store sends one request (a command or a transaction) and
waits for its answer, so what arrives from the server after a request is that request's answer.
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
    """What happens to one request. In all but the first the server has acted on it."""

    UNSENT = "unsent"  # the connection ends before the server has seen the request
    LOST = "lost"  # ... after the server has answered, before the client has seen anything of it
    RESET = "reset"  # the same with a RST, which also throws away what was sent before
    CUT = "cut"  # ... in the middle of the answer
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
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=CHUNK)
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
        fault: list[Fault | None] = [None]  # of the request that is being answered

        async def requests() -> None:
            while data := await client.read(CHUNK):
                fault[0] = self.choose(data) or fault[0]
                if fault[0] is Fault.UNSENT:
                    self.suffered[Fault.UNSENT] += 1
                    return
                to_server.write(data)
                await to_server.drain()

        async def answers() -> None:
            while data := await server.read(CHUNK):
                suffers, fault[0] = fault[0], None
                if suffers is not None:
                    self.suffered[suffers] += 1
                if suffers is Fault.DELAYED:
                    await asyncio.sleep(DELAY_S)
                elif suffers is Fault.CUT:
                    data = data[: len(data) // 2]
                if suffers in (None, Fault.DELAYED, Fault.CUT):
                    to_client.write(data)
                    await to_client.drain()
                if suffers is Fault.RESET:
                    end_with_reset(to_client)
                if suffers in (Fault.LOST, Fault.RESET, Fault.CUT):
                    return

        ways = [asyncio.ensure_future(requests()), asyncio.ensure_future(answers())]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for writer in (to_client, to_server):
                with suppress(OSError):
                    writer.close()


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
