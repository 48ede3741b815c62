"""A process for each episode, seen from the collector: begun, called with a limit, ended with all that it started."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

import msgspec

from asyncrl.environments.child import Child
from asyncrl.environments.wire import (
    LARGEST_REPLY,
    PACKET_BYTES,
    Begin,
    Built,
    Call,
    Command,
    End,
    Ended,
    Event,
    NotBegun,
    Ready,
    Reply,
    pair,
)
from asyncrl.rewards.worker import HEADER

logger = logging.getLogger(__name__)

START_LIMIT_S = 60.0  # built-in tasks need 0.1 s; a task of a user's may import a library as heavy as torch
END_LIMIT_S = 10.0  # for the kernel to end what was killed
KEPT_OUTPUT = 2000  # bytes, the last ones: what a process said before its end
READ_BYTES = 65536
MOST_STARTS = max(4, os.cpu_count() or 1)
"""Processes on their way to be ready: where each is an interpreter that imports, more would make all of them late."""


class ProcessesLost(Exception):
    """No process can be had now: the one they are made from does not start, or has ended."""


class CallFailed(Exception):
    """A call has no result. `kind`: raised and invalid leave the process as it is; timeout and died end it."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class Processes:
    """Makes processes that call what `factory(**arguments)` returned: "module:function", imported there; arguments hold
    JSON values. It is called once, before the first, unless it leaves threads behind (`zygote.py`).

    memory_bytes: of address space that each may have; None: no limit. All of them end with this process, also when it
    is killed.
    """

    def __init__(self, factory: str, arguments: dict[str, Any], *, memory_bytes: int | None = None) -> None:
        self._start = Child(factory, arguments, list(sys.path), memory_bytes)
        self._zygote: _Zygote | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Raises ProcessesLost, with what the factory raised if that is the reason."""
        async with self._starting:
            if self._zygote is None or self._zygote.gone:
                self._zygote = await _Zygote.start(self._start)

    async def begin(self, seed: int) -> Process:
        """A process that nobody has called yet. Raises ProcessesLost: also when its building fails where it has to be
        made anew."""
        await self.start()
        assert self._zygote is not None
        return await self._zygote.begin(seed)

    async def close(self) -> None:
        """End all processes; calls in flight fail."""
        if self._zygote is not None:
            await self._zygote.close()


class Process:
    """One of them."""

    def __init__(self, number: int, zygote: _Zygote, output: int) -> None:
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()  # its exit status
        self._number, self._zygote = number, zygote
        self._output = _Output(output)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def connect(self, stream: socket.socket, start: bytes) -> None:
        """Raises ProcessesLost unless it comes to where it can be called."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=stream)
        if start:
            self._writer.write(HEADER.pack(len(start)) + start)
        try:
            async with asyncio.timeout(START_LIMIT_S):
                ready = msgspec.msgpack.decode(await self._frame(), type=Ready)
        except TimeoutError:
            raise ProcessesLost(f"an episode's process was not ready after {START_LIMIT_S:.0f} s") from None
        except CallFailed as error:
            raise ProcessesLost(f"an episode's process ended before it was ready: {error}") from error
        if ready.error:
            raise ProcessesLost(f"an episode's process cannot build what it calls: {ready.error}")

    async def call(self, method: str, *arguments: Any, limit_s: float) -> Any:
        """The method's result, as plain values. One call at a time. Raises CallFailed; ends the process when it takes
        longer than `limit_s`, or is cancelled. Raises ProcessesLost if all of them are gone."""
        assert self._writer is not None
        body = msgspec.msgpack.encode(Call(method, list(arguments)))
        whole = False
        try:
            async with asyncio.timeout(limit_s):
                self._writer.write(HEADER.pack(len(body)) + body)
                await self._writer.drain()  # a process that does not read is as late as one that does not answer
                reply = msgspec.msgpack.decode(await self._frame(), type=Reply)
            whole = True
        except TimeoutError:
            raise CallFailed("timeout", f"{method} took longer than {limit_s:g} s") from None
        except (OSError, msgspec.DecodeError) as error:  # a DecodeError: user's code has found the stream
            raise await self._death() from error
        finally:
            if not whole:
                self.kill()
        if reply.fault:
            raise CallFailed(reply.fault, reply.detail)
        return reply.value

    def lost(self) -> None:
        """Its maker is gone, and so is it. What it started may hold its end of the stream open."""
        self.ended.set_result(-signal.SIGKILL)
        if self._reader is not None:
            self._reader.feed_eof()

    def kill(self) -> None:
        """End it and all that it started; does not wait."""
        if not self.ended.done():
            self._zygote.tell(End(self._number))

    async def end(self) -> None:
        """As `kill`, and wait until nothing of it is left. Raises nothing."""
        self.kill()
        if self._writer is not None:
            self._writer.close()
        await asyncio.wait({self.ended}, timeout=END_LIMIT_S)
        self._output.close()

    async def _frame(self) -> bytes:
        """Raises CallFailed at the stream's end, and for a message that is too large."""
        assert self._reader is not None
        try:
            (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            if size > LARGEST_REPLY:  # no reply of ours
                raise await self._death()
            return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self._death() from None

    async def _death(self) -> CallFailed | ProcessesLost:
        """Why nothing more comes from it: its own end, or that of all."""
        self.kill()
        await asyncio.wait({self.ended}, timeout=END_LIMIT_S)
        if self._zygote.gone:
            return ProcessesLost("the process that those of episodes are made from is gone, and they with it")
        code = self.ended.result() if self.ended.done() else 0
        said = self._output.last().strip()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return CallFailed("died", f"the process {how}" + (f"; its last words: {said}" if said else ""))


class _Output:
    """What a process prints: read as fast as it comes, so that nobody waits to print, and all but the end forgotten."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        self._kept = bytearray()
        os.set_blocking(descriptor, False)
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    def last(self) -> str:
        self._read()
        return self._kept.decode(errors="replace")

    def close(self) -> None:
        if self._descriptor is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def _read(self) -> None:
        if self._descriptor is None:
            return
        try:
            piece = os.read(self._descriptor, READ_BYTES)
        except BlockingIOError:
            return
        if not piece:
            self.close()
            return
        self._kept += piece
        del self._kept[:-KEPT_OUTPUT]


class _Zygote:
    """The process that the others are made from, as long as it lives."""

    def __init__(self, process: asyncio.subprocess.Process, commands: socket.socket, start: Child) -> None:
        self._process, self._commands, self._start = process, commands, start
        self._made: dict[int, Process] = {}  # those that have not ended
        self._numbers = itertools.count()
        self._starts = asyncio.Semaphore(MOST_STARTS)
        self._threads = 0
        self._listening: asyncio.Task[None] | None = None
        self.gone = False

    @classmethod
    async def start(cls, start: Child) -> _Zygote:
        """Raises ProcessesLost."""
        ours, theirs = pair()
        try:
            process = await asyncio.create_subprocess_exec(
                # -P: the working folder must not come first on sys.path: a json.py in it would hide the real one
                *(sys.executable, "-P", "-m", "asyncrl.environments.zygote", str(os.getpid()), str(theirs.fileno())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        finally:
            theirs.close()
        ours.setblocking(False)
        zygote = cls(process, ours, start)
        try:
            await zygote._build()
        except BaseException:
            await zygote.close()
            raise
        return zygote

    async def _build(self) -> None:
        body = msgspec.msgpack.encode(self._start)
        assert self._process.stdin is not None
        self._process.stdin.write(HEADER.pack(len(body)) + body)
        try:
            async with asyncio.timeout(START_LIMIT_S):
                event = await self._event()
        except TimeoutError:
            raise ProcessesLost(
                f"the processes of episodes could not be made within {START_LIMIT_S:.0f} s: "
                "the import or the constructor of the task hangs"
            ) from None
        if not isinstance(event, Built):
            raise ProcessesLost("the process that those of episodes are made from ended: see its output above")
        if event.error:
            raise ProcessesLost(f"the processes of episodes cannot be made: {event.error}")
        self._threads = event.threads
        if self._threads > 1:
            logger.info(
                "importing the task has started threads, which no fork survives: every episode starts an interpreter"
            )
        self._listening = asyncio.ensure_future(self._listen())

    async def begin(self, seed: int) -> Process:
        """See `Processes.begin`."""
        async with self._starts:  # each within START_LIMIT_S
            return await self._begin(seed)

    async def _begin(self, seed: int) -> Process:
        ours, theirs = socket.socketpair()
        readable, writable = os.pipe()
        number = next(self._numbers)
        process = self._made[number] = Process(number, self, readable)
        try:
            try:
                self.tell(Begin(number, seed), theirs.fileno(), writable)
            finally:
                theirs.close()
                os.close(writable)
            ours.setblocking(False)
            await process.connect(ours, msgspec.msgpack.encode(self._start) if self._threads > 1 else b"")
        except BaseException:
            ours.close()
            await process.end()
            raise
        return process

    def tell(self, command: Command, *descriptors: int) -> None:
        """Never waits. What is told to a zygote that is gone has come true: with it all processes ended."""
        with suppress(OSError):
            socket.send_fds(self._commands, [msgspec.msgpack.encode(command)], descriptors)

    async def close(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        self._commands.close()  # its end ends the zygote, and that its children
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(END_LIMIT_S):
                await self._process.wait()
        except TimeoutError:  # it still builds
            self._process.kill()
            await asyncio.wait({asyncio.ensure_future(self._process.wait())}, timeout=END_LIMIT_S)
        self._all_gone()

    async def _listen(self) -> None:
        """What became of the processes, until the zygote is gone."""
        while (event := await self._event()) is not None:
            match event:
                case Ended(id=number, status=status):
                    self._made.pop(number).ended.set_result(status)
                case NotBegun(id=number, error=error):
                    logger.warning("an episode's process could not be made: %s", error)
                    self._made.pop(number).ended.set_result(1)
                case _:
                    raise AssertionError(event)
        logger.error("the process that those of episodes are made from is gone, and they with it")
        self._all_gone()

    async def _event(self) -> Event | None:
        """The next one, None at their end."""
        try:
            packet = await asyncio.get_running_loop().sock_recv(self._commands, PACKET_BYTES)
        except OSError:
            return None
        return msgspec.msgpack.decode(packet, type=Event) if packet else None

    def _all_gone(self) -> None:
        self.gone = True
        while self._made:
            self._made.popitem()[1].lost()
