"""The process beside a verifier that runs programs: it forks a child for each, watches it, and clears up after it.

Started by `sandbox.py` with an environment of its own making: no child can find in its memory what was never there. A
fork needs no interpreter to start, and shares what was imported. Each child shuts itself in (`sandbox_walls.py`) before
it runs a line that it was given.

It has a session of its own and outlives the verifier that it belongs to, which may be killed at any time, for as long
as it takes to kill the children and remove their folders. Processes that a child abandons would become this one's
(it is a "subreaper"): after each program every child is killed until there is none.

It imports the standard library only, so that its messages are JSON: site-packages are not on its path, unless a recipe
names modules.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import io
import json
import os
import resource
import select
import signal
import site
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.rewards import sandbox_walls
from asyncrl.rewards.sandbox_calls import Peer
from asyncrl.rewards.sandbox_folder import Folders, held, remove, usage
from asyncrl.rewards.sandbox_tests import GONE, SAW_THE_END, run_module, run_tests, serve_module

HEADER = struct.Struct(">I")
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
COMMON = (
    "array bisect collections copy datetime decimal enum fractions functools heapq io itertools json math operator "
    "queue random re statistics string threading typing"
)
"""What answers import most: once, here."""

LOOK_S = 0.05  # between looks at threads and folder, which no kernel limit bounds for an ordinary user
LAST_S = 1.0  # for the kernel to end a process that has closed its descriptors
THREADS = 64
FILES_OPEN = 64
FILE_BYTES = 16 << 20
FOLDER_BYTES = 64 << 20
OUTPUT_BYTES = 1 << 20  # of each output
ABOVE = 100  # descriptors that are put in order go here first: above those that they are to become
ROUNDS = 1000  # of killing: each round finds what those of the one before have left

STANDING = b"ok"  # a child's word that its walls stand

Job = Callable[[], None]


class Settings(NamedTuple):
    """Of all programs. modules: to be imported, from `path`, which is readable to programs; walls: those of
    sandbox_walls."""

    modules: list[str]
    path: list[str]
    memory_bytes: int
    walls: list[str]


class Run(NamedTuple):
    """One program. limit_s: for it, or for each test and for what comes before the first one; total_s: for all."""

    tested: bool
    limit_s: float
    total_s: float


class Given(NamedTuple):
    """Descriptors of the verifier's, in memory: this process hands them on and never reads one, because what it has
    read would be in the memory of all later children."""

    source: int
    input: int  # standard input, or tests
    output: int
    errors: int
    records: int


def main() -> None:
    """Build, say so, then run programs until the verifier is gone. In a child, be that program."""
    commands = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end of the commands says that the verifier is gone
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        settings = Settings(*json.loads(read_frame(commands)[0]))
        sys.path.extend(settings.path)
        for name in (*COMMON.split(), *settings.modules):
            importlib.import_module(name)
        for names in (site.setquit, site.setcopyright, site.sethelper):  # exit() and others, which scripts call
            names()
        if (threads := len(os.listdir("/proc/self/task"))) > 1:  # their locks would stay locked in every child
            raise RuntimeError(f"importing {', '.join(settings.modules)} starts {threads - 1} threads")
        folders = Folders()
    except BaseException as error:
        say(commands, f"the sandbox cannot be started: {type(error).__name__}: {error}")
    else:
        say(commands, "")
        job = Keeper(commands, settings, folders).serve()
        if job is not None:  # a child: it ends as a script does, with its threads joined and its output flushed
            job()


class Keeper:
    """Runs one program at a time."""

    def __init__(self, commands: socket.socket, settings: Settings, folders: Folders) -> None:
        self._commands, self._settings, self._folders = commands, settings, folders

    def serve(self) -> Job | None:
        """Returns at the end of the commands; in a child, what it is to do."""
        nobody = sandbox_walls.NOBODY if "user" in self._settings.walls and os.geteuid() == 0 else None
        outcome: dict[str, Any] | None = {}
        while outcome is not None:
            body, descriptors = read_frame(self._commands)
            if not body:
                break
            folder = self._folders.new(nobody)
            programs = Programs(self._settings, Run(*json.loads(body)), Given(*descriptors), folder, nobody)
            if (job := programs.start()) is not None:
                return job
            outcome = programs.watch(self._commands)
            if outcome is not None:
                say(self._commands, outcome)
            try:
                remove(folder)  # may take seconds, if a program was made for that
            except OSError as error:  # `Folders.close` tries again; the next program has another one
                sys.stderr.write(f"asyncrl: a sandboxed program's folder stays: {error}\n")
        self._folders.close()
        return None


class Programs:
    """The processes of one run: the answer's, and with tests a second one, which never runs a line of the answer's."""

    def __init__(self, settings: Settings, run: Run, given: Given, folder: Path, user: int | None) -> None:
        self._settings, self._run, self._given, self._folder, self._user = settings, run, given, folder, user
        self._limited = "limits" in settings.walls
        self._parent = os.getpid()
        self._pids: list[int] = []  # the answer's first
        self._codes: dict[int, int | None] = {}  # how each ended; None: killed here
        self._cpu_s = 0.0  # of the answer's
        self._states: dict[int, bytes] = {}  # pipes on which each child says that its walls stand, and what it said
        self._output = self._errors = self._ticks = -1
        self._counts: dict[int, int] = {}  # bytes that came out of each pipe
        self._opened: set[int] = set()  # pipes before their end

    def start(self) -> Job | None:
        """Fork. In a child: what it is to do."""
        given = self._given
        self._output, output = os.pipe()
        self._errors, errors = os.pipe()
        here = [output, errors, given.source, given.input]
        if not self._run.tested:
            job = self._fork([given.input, output, errors, given.source], self._be_program)
        else:
            answer, tests = (end.detach() for end in socket.socketpair())
            self._ticks, ticks = os.pipe()
            nothing = os.open(os.devnull, os.O_RDWR)
            here += [answer, tests, ticks, nothing]
            job = self._fork([nothing, output, errors, given.source, answer], self._be_answer) or self._fork(
                [nothing, nothing, nothing, given.input, tests, ticks, given.records], self._be_tests
            )
        if job is None:
            for descriptor in here:
                os.close(descriptor)
        return job

    def _fork(self, descriptors: list[int], job: Job) -> Job | None:
        state, said = os.pipe()
        if (pid := os.fork()) == 0:
            return lambda: self._become([*descriptors, said], job)
        os.close(said)
        self._states[state] = b""
        self._pids.append(pid)
        return None

    def _become(self, descriptors: list[int], job: Job) -> None:
        """Be a child: with these descriptors from 0 on and no others, its folder, and its walls."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        for number, descriptor in enumerate([fcntl.fcntl(n, fcntl.F_DUPFD, ABOVE) for n in descriptors]):
            os.dup2(descriptor, number)
        os.closerange(len(descriptors), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        state = len(descriptors) - 1
        try:
            os.chdir(self._folder)
            os.environ.update(HOME=str(self._folder), TMPDIR=str(self._folder))
            tempfile.tempdir = None  # where this process's own is
            sandbox_walls.enter(
                self._folder,
                readable=self._settings.path,
                memory_bytes=self._settings.memory_bytes,
                cpu_s=int(self._run.total_s) + 1,
                file_bytes=FILE_BYTES,
                files=FILES_OPEN,
                walls=frozenset(self._settings.walls),
                parent=self._parent,
            )
        except BaseException as error:
            os.write(state, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            binary: Any = open(number, "rb" if number == 0 else "wb")  # noqa: SIM115
            text = io.TextIOWrapper(binary, encoding="utf-8", errors="backslashreplace")
            setattr(sys, name, text)
            setattr(sys, f"__{name}__", text)
        sys.argv = ["answer.py"]
        os.write(state, STANDING)
        os.close(state)
        job()

    def _be_program(self) -> None:
        run_module("__main__", read_text(3))

    def _be_answer(self) -> None:
        serve_module(run_module("answer", read_text(3)), Peer(4, opened=True))

    def _be_tests(self) -> None:
        items = json.loads(read_text(3))
        run_tests(Peer(4, opened=False), items, ticks=5, records=6)

    def watch(self, commands: socket.socket) -> dict[str, Any] | None:
        """Wait for the end, or make one; nothing is left of it afterwards. None: the verifier is gone."""
        now = time.monotonic()
        deadline, last, look = now + self._run.limit_s, now + self._run.total_s, now
        waited = {os.pidfd_open(pid): pid for pid in self._pids}
        ended = self._pids[-1]  # the tests, or the only one: with it, all has ended
        self._opened = {pipe for pipe in (self._output, self._errors, self._ticks, *self._states) if pipe >= 0}
        self._counts = dict.fromkeys(self._opened, 0)
        reason = ""
        while not reason and ended in waited.values():
            wait_s = max(0.0, min(look + LOOK_S, deadline, last) - time.monotonic())
            ready, _, _ = select.select([*self._opened, *waited, commands.fileno()], [], [], wait_s)
            now = time.monotonic()
            for descriptor in ready:
                if descriptor == commands.fileno():  # nothing is sent while a program runs: it is their end
                    reason = GONE
                elif descriptor in waited:
                    del waited[descriptor]
                    os.close(descriptor)
                elif self._take(descriptor) and descriptor == self._ticks:
                    deadline = now + self._run.limit_s
                elif self._flooded():
                    reason = reason or "output_flood"
            if now >= look + LOOK_S and self._limited:
                reason, look = reason or self._look(), now
            if now >= min(deadline, last) and ended in waited.values():
                reason = reason or "timeout"
        if self._run.tested and not reason and waited:
            # Perhaps the tests ended because the answer did, whose descriptors are closed before it is dead.
            select.select([*waited], [], [], LAST_S if self._code(ended) == SAW_THE_END else 0)
        self._end_all()
        for descriptor in waited:
            os.close(descriptor)
        for pipe in self._counts:
            while pipe in self._opened and self._take(pipe):
                pass
            os.close(pipe)
        for descriptor in (self._given.output, self._given.errors, self._given.records):
            os.close(descriptor)
        return None if reason == GONE else self._outcome(reason)

    def _take(self, pipe: int) -> int:
        """Bytes that came out of a pipe; 0 at its end. What was written is moved, not read."""
        if pipe in self._states or pipe == self._ticks:
            piece = os.read(pipe, 1 << 10)
            count = len(piece)
            if pipe in self._states:
                self._states[pipe] += piece
        elif self._flooded():  # it is lost already
            count = 0
        else:
            try:
                target = self._given.output if pipe == self._output else self._given.errors
                count = os.splice(pipe, target, 1 << 16, flags=os.SPLICE_F_NONBLOCK)
            except BlockingIOError:  # the program has opened it as well, by its name in /proc, and was quicker
                return 0
        self._counts[pipe] += count
        if not count:
            self._opened.discard(pipe)
        return count

    def _flooded(self) -> bool:
        return self._limited and max(self._counts[self._output], self._counts[self._errors]) > OUTPUT_BYTES

    def _look(self) -> str:
        """What of it is too much."""
        for pid in self._pids:
            with suppress(OSError):
                if len(os.listdir(f"/proc/{pid}/task")) > THREADS:
                    return "thread_flood"
        unnamed = sum(held(pid, self._folder, self._user, FILE_BYTES) for pid in self._pids)
        return "disk_flood" if usage(self._folder) + unnamed > FOLDER_BYTES else ""

    def _code(self, pid: int) -> int | None:
        """How a child has ended, which is not reaped yet: its exit code, or minus a signal's number; None: it lives."""
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def _end_all(self) -> None:
        """Kill every child of this process, and what those leave behind, until none is left."""
        self._codes = {pid: self._code(pid) for pid in self._pids}
        for _ in range(ROUNDS):
            if not (pids := [int(pid) for pid in Path("/proc/thread-self/children").read_text().split()]):
                return
            for pid in pids:
                os.kill(pid, signal.SIGKILL)  # not reaped, so that its number is still its own
            for pid in pids:
                _, _, used = os.wait4(pid, 0)
                if pid == self._pids[0]:
                    self._cpu_s = used.ru_utime + used.ru_stime

    def _outcome(self, reason: str) -> dict[str, Any]:
        code = self._codes[self._pids[0]]
        if not reason and self._flooded():
            reason = "output_flood"
        if not reason and code in (-signal.SIGXCPU, -signal.SIGKILL):  # by the kernel, for one limit or the other
            reason = "timeout" if self._cpu_s >= int(self._run.total_s) else "memory"
        return {"reason": reason, "code": code, "failed": self._failed(reason)}

    def _failed(self, reason: str) -> str:
        """Why the run says nothing of the program; "" if it does. The tests may not have begun when it was ended for
        what it did by itself."""
        for n, said in enumerate(self._states.values()):
            if said != STANDING and (said or n == 0 or reason in ("", "timeout")):
                return said.decode(errors="replace") or "a process did not begin in time"
        return ""


def read_text(descriptor: int) -> str:
    """All of what the verifier has put there."""
    with open(descriptor, "rb") as file:
        return file.read().decode("utf-8", "replace")


def read_frame(stream: socket.socket) -> tuple[bytes, list[int]]:
    """One message, and the descriptors that came with it; b"" at the end."""
    try:
        received, descriptors, _, _ = socket.recv_fds(stream, HEADER.size, len(Given._fields))
    except ConnectionResetError:  # it ended with something unread
        return b"", []
    if len(received) < HEADER.size:
        return b"", []
    (size,) = HEADER.unpack(received)
    body = bytearray()
    while len(body) < size:
        if not (piece := stream.recv(size - len(body))):
            return b"", []
        body += piece
    return bytes(body), descriptors


def say(commands: socket.socket, message: Any) -> None:
    """The same to a verifier that may be gone."""
    with suppress(OSError):  # the verifier is gone, which is seen where commands are read
        write_frame(commands, message)


def write_frame(stream: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    """Send one message, a JSON value. Raises OSError if nobody is there."""
    body = json.dumps(message).encode()
    socket.send_fds(stream, [HEADER.pack(len(body))], descriptors)
    stream.sendall(body)
