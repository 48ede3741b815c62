"""The process that the processes of episodes are made from: it builds once what they call, and forks for each.

Started as `python -P -m asyncrl.environments.zygote PARENT_PID COMMANDS`, the second a descriptor. A fork takes two
milliseconds and shares all memory, and each child begins in the same state: what an episode changes in its process, no
other one can see. Nothing of the user's runs here after the building.

A fork copies only the thread that calls it; locks that another one holds stay locked for ever. So where the building
left threads behind, children are fresh interpreters that build by themselves.

Whatever a child started dies with it. While it lives, processes that it abandons become its own children (it is a
"subreaper"); when it ends, all of them become children of this process, which is one too, and knows the children that
it has made: any other one is an orphan of an episode that has ended.
"""

from __future__ import annotations

import ctypes
import gc
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from asyncrl.environments import child
from asyncrl.environments.wire import PACKET_BYTES, Begin, Built, Command, End, Ended, Event, NotBegun
from asyncrl.rewards.worker import build, die_with_parent, last_line, read_frame, take_protocol

ROUNDS = 1000  # of looking for orphans: each kills those that are there, and those that they started are there next
LAST_S = 5.0  # for the children to be gone at the end


def main() -> None:
    """Build, say so, then make and end children until the collector is gone."""
    parent, descriptor = map(int, sys.argv[1:])
    die_with_parent(parent)
    commands = socket.socket(fileno=descriptor)
    requests, _ = take_protocol()
    start = msgspec.msgpack.decode(read_frame(requests), type=child.Child)
    try:
        target = build(start)
        zygote = Zygote(commands, parent, target, start)
    except BaseException as error:  # SystemExit too: the collector must hear why
        send(commands, Built(0, last_line(error)))
        return
    gc.freeze()  # a collection in a child would write to all memory that it shares
    send(commands, Built(zygote.threads))
    zygote.run()
    sys.stdout.flush()
    os._exit(0)  # threads of the user's are not waited for


class Zygote:
    """Children by the ids that the collector has for them."""

    def __init__(self, commands: socket.socket, parent: int, target: Any, start: child.Child) -> None:
        self.threads = len(os.listdir("/proc/self/task"))
        self._commands, self._target, self._start = commands, target, start
        self._pids: dict[int, int] = {}
        self._watched: dict[int, int] = {}  # id -> a descriptor that can be read when the child has ended
        ctypes.CDLL(None).prctl(child.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._own = set(children())  # started by the building, and perhaps needed
        self._selector = selectors.DefaultSelector()
        self._selector.register(commands, selectors.EVENT_READ)
        # From here on there may be children to be ended, so that the collector's death must not be this one's. The
        # commands' end says it too, unless the collector has forked.
        self._woken, waker = socket.socketpair()
        self._woken.setblocking(False)
        waker.setblocking(False)
        self._waker = waker
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: None)
        self._selector.register(self._woken, selectors.EVENT_READ)
        die_with_parent(parent, signal.SIGTERM)

    def run(self) -> None:
        """Returns when the collector is gone, and all children are."""
        going = True
        while going:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    going = False
                elif key.fileobj is self._commands:
                    going = going and self._obey()
                else:
                    self._reap(key.data)
        for number in self._pids:
            self._kill(number)
        deadline = time.monotonic() + LAST_S
        while self._pids and time.monotonic() < deadline:
            for key, _ in self._selector.select(timeout=LAST_S):
                if isinstance(key.data, int):
                    self._reap(key.data)

    def _obey(self) -> bool:
        """One command; False at their end."""
        packet, descriptors, _, _ = socket.recv_fds(self._commands, PACKET_BYTES, 2)
        if not packet:
            return False
        match msgspec.msgpack.decode(packet, type=Command):
            case Begin(id=number, seed=seed):
                try:
                    stream, output = descriptors
                    self._begin(number, stream, output, seed)
                except OSError as error:  # no more processes, descriptors or memory
                    send(self._commands, NotBegun(number, str(error)))
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)
            case End(id=number):
                self._kill(number)
        return True

    def _begin(self, number: int, stream: int, output: int, seed: int) -> None:
        pid = self._new(stream, output, seed) if self.threads > 1 else self._fork(stream, output, seed)
        try:
            watched = os.pidfd_open(pid)
        except OSError:  # its end would never be seen
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._pids[number], self._watched[number] = pid, watched
        self._selector.register(watched, selectors.EVENT_READ, number)

    def _fork(self, stream: int, output: int, seed: int) -> int:
        here = os.getpid()
        if (pid := os.fork()) != 0:
            return pid
        self._be_child(here, stream, output, seed)

    def _be_child(self, parent: int, stream: int, output: int, seed: int) -> NoReturn:
        """The other side of a fork; nothing of it may ever run what the zygote does."""
        try:
            child.restore_signals()
            os.setsid()
            for descriptor in (*self._watched.values(), *map(socket.socket.fileno, self._sockets())):
                os.close(descriptor)
            self._selector.close()
            child.serve(child.become(parent, stream, output, seed), self._target, self._start.memory_bytes)
        finally:
            os._exit(1)

    def _sockets(self) -> tuple[socket.socket, ...]:
        return (self._commands, self._woken, self._waker)

    def _new(self, stream: int, output: int, seed: int) -> int:
        numbers = map(str, (os.getpid(), stream, output, seed))
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "asyncrl.environments.child", *numbers],
            stdin=subprocess.DEVNULL,
            pass_fds=(stream, output),
            start_new_session=True,
        )
        process.returncode = 0  # it is waited for below, not by the object
        return process.pid

    def _kill(self, number: int) -> None:
        if (pid := self._pids.get(number)) is not None:
            for kill in (os.killpg, os.kill):
                with suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)

    def _reap(self, number: int) -> None:
        """A child has ended: nothing that it started may outlive it."""
        pid, watched = self._pids.pop(number), self._watched.pop(number)
        self._selector.unregister(watched)
        os.close(watched)
        with suppress(ProcessLookupError, PermissionError):  # while its number cannot be another's
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        self._end_orphans()
        send(self._commands, Ended(number, os.waitstatus_to_exitcode(status)))

    def _end_orphans(self) -> None:
        for _ in range(ROUNDS):
            if not (orphans := set(children()) - self._own - set(self._pids.values())):
                return
            for pid in orphans:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in orphans:
                with suppress(ChildProcessError):
                    os.waitpid(pid, 0)


def children() -> list[int]:
    """Process ids of the children of this process, of all its threads."""
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def send(commands: socket.socket, event: Event) -> None:
    with suppress(OSError):  # the collector is gone, which is seen where commands are read
        commands.send(msgspec.msgpack.encode(event))


if __name__ == "__main__":
    main()
