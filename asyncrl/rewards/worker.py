"""A verifier process: builds one scorer, then answers score calls until its standard input ends.

Started by `pool.py` as `python -P -m asyncrl.rewards.worker PARENT_PID`. Each message, both ways, is a msgpack value
after its length (4 bytes, big-endian). In: a `Start`, then lists of score calls, each an encoded triple (part, row,
answer), of which the last two are plain dicts. Out: a `Ready`, then a `Scored` for each call, sent before the next call
begins: the parent knows from what has arrived which call a hanging process is in.

It imports the standard library and msgspec only (what the task adds is the task's), because a killed worker's
replacement must be ready soon.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
import signal
import struct
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any, BinaryIO, Protocol

import msgspec

from asyncrl.rewards.base import BadRow
from asyncrl.rewards.parts import BAD_ROW, MEMORY, RAISED, Verdict, check_weights, judge, short

HEADER = struct.Struct(">I")
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Scorer(Protocol):
    """What the factory of a pool returns. `row` and `answer` are the fields of what `VerifierPool.verdict` got."""

    def score(self, row: dict[str, Any], answer: dict[str, Any]) -> object:
        """What the task's `score` returned, whatever it is: `parts.judge` looks at it."""

    def verify(self, part: str, row: dict[str, Any], answer: dict[str, Any]) -> object:
        """The same of one part that has a limit of its own. Only called for parts that are given to the pool."""

    def part_weights(self) -> Mapping[str, float]:
        """Weight of each part; one that is left out weighs 1."""


class Start(msgspec.Struct):
    """The first message to a worker: what to build."""

    factory: str  # module:function
    arguments: dict[str, Any]  # its keyword arguments
    path: list[str]  # that it searches for modules: the parent's sys.path, and last the working folder
    memory_bytes: int | None = None  # that it may write to; None: any


class Scored(msgspec.Struct, array_like=True):
    """The worker's answer to one score call."""

    verdict: Verdict
    seconds: float  # that the call took


class Ready(msgspec.Struct):
    """The worker's answer to it, when it can score or never will."""

    weights: dict[str, float]
    error: str = ""  # the scorer could not be built


def main() -> None:
    """Build, say so, then answer each score call. The argument is the parent's process id."""
    die_with_parent(int(sys.argv[1]))
    requests, replies = take_protocol()
    start = msgspec.msgpack.decode(read_frame(requests), type=Start)
    try:
        limit_memory(start.memory_bytes)
        scorer = build(start)
        ready = Ready(check_weights(scorer.part_weights()))
    except BaseException as error:  # SystemExit too: the parent must hear why, and nothing else may answer it
        write_frame(replies, Ready({}, last_line(error)))
        return
    write_frame(replies, ready)
    own = os.getpid()
    while calls := read_frame(requests):
        for call in msgspec.msgpack.decode(calls, type=list[bytes]):
            part, row, answer = msgspec.msgpack.decode(call)
            began = time.perf_counter()
            found = verdict(scorer, part, row, answer)
            if os.getpid() != own:  # a child that the task forked, and that came back: it would answer other calls
                os._exit(1)
            write_frame(replies, Scored(found, time.perf_counter() - began))
    sys.stdout.flush()
    os._exit(0)  # not sys.exit: threads of the task's would be waited for, and nobody is left who could end the wait


def verdict(scorer: Scorer, part: str, row: dict[str, Any], answer: dict[str, Any]) -> Verdict:
    """One score call; whatever is raised, `sys.exit()` included, becomes a failure. part: "" for the whole score."""
    try:
        return judge(scorer.verify(part, row, answer) if part else scorer.score(row, answer))
    except BadRow as error:
        return Verdict({}, BAD_ROW, short(error))
    except MemoryError as error:
        return Verdict({}, MEMORY, f"more memory than collector.score_memory_limit: {last_line(error)}")
    except BaseException as error:
        return Verdict({}, RAISED, last_line(error))


def limit_memory(size: int | None) -> None:
    """What this process and those that it starts may each write to, bytes. Beyond it, allocations fail: MemoryError.

    Not the address space: libraries reserve much of it that is never used, CUDA the most.
    """
    if size is not None:
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        size = size if most == resource.RLIM_INFINITY else min(size, most)
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def last_line(error: BaseException) -> str:
    """The traceback's last line and the innermost place: what a person needs to find the fault."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return short(traceback.format_exception_only(error)[-1].strip()[:300] + place)


def build(start: Start) -> Any:
    """What the factory returns. Raises what importing and calling it raises."""
    sys.path.extend(entry for entry in start.path if entry not in sys.path)
    module, _, name = start.factory.partition(":")
    return getattr(importlib.import_module(module), name)(**start.arguments)


def die_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel kill this process when the parent is gone, even by SIGKILL, even amid a computation.

    The end of standard input says the same, but only to a process that reads: `5**5**5**5` holds the interpreter, no
    thread and no signal handler of Python's would run. Elsewhere than on Linux the end of input is all there is.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(by), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the call: no signal will come
        os._exit(1)


def take_protocol() -> tuple[BinaryIO, BinaryIO]:
    """Move the protocol to descriptors of its own: code of the task's that prints, or reads input, must not touch it.

    What is printed goes to standard error, and reading standard input finds its end.
    """
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def read_frame(stream: BinaryIO) -> bytes:
    """One message, b"" at the end of the stream (a message cut short is an end too: its sender is gone)."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return b""
    (size,) = HEADER.unpack(header)
    body = stream.read(size)
    return body if len(body) == size else b""


def write_frame(stream: BinaryIO, message: object) -> None:
    """Send one message: its length, then its bytes as MessagePack."""
    body = msgspec.msgpack.encode(message)
    stream.write(HEADER.pack(len(body)) + body)
    stream.flush()


if __name__ == "__main__":
    main()
