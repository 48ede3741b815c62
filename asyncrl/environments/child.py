"""The process of one episode: answers calls until it is killed.

It is forked by the zygote, or started anew as `python -P -m asyncrl.environments.child PARENT_PID STREAM OUTPUT SEED`,
where both numbers in the middle are descriptors that it was given; then it builds what it calls by itself.
"""

from __future__ import annotations

import ctypes
import io
import os
import random
import resource
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from asyncrl.environments.wire import LARGEST_REPLY, Call, Ready, Reply
from asyncrl.rewards.worker import Start, build, die_with_parent, last_line, read_frame, write_frame

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Unusable(Exception):
    """What the user's code returned cannot be used; the message says what to return."""


class Child(Start):
    """What is built, and how much memory it may have (bytes of address space; None: no limit)."""

    memory_bytes: int | None = None


def main() -> None:
    """Of a process that was started anew."""
    parent, stream, output, seed = map(int, sys.argv[1:])
    channel = become(parent, stream, output, seed)
    start = msgspec.msgpack.decode(read_frame(channel), type=Child)
    try:
        target = build(start)
    except BaseException as error:  # SystemExit too: the parent must hear why
        write_frame(channel, Ready(last_line(error)))
        return
    serve(channel, target, start.memory_bytes)


def become(parent: int, stream: int, output: int, seed: int) -> BinaryIO:
    """Make this process the one of an episode; returns its way to the collector.

    What is printed goes where only so much of it is kept; reading standard input finds its end. Processes that it
    starts and abandons become its own children (`zygote.py` then finds them), and the kernel, short of memory, takes it
    before the collector.
    """
    die_with_parent(parent)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)
    os.set_inheritable(stream, False)
    with suppress(OSError):  # in a container that does not allow it
        Path("/proc/self/oom_score_adj").write_text("1000")
    random.seed(seed)  # forks would all draw the same numbers
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    for text in (sys.stdout, sys.stderr):
        if isinstance(text, io.TextIOWrapper):
            text.reconfigure(line_buffering=True)  # what it said last is what explains its end
    return cast("BinaryIO", socket.socket(fileno=stream).makefile("rwb"))


def serve(channel: BinaryIO, target: Any, memory_bytes: int | None) -> None:
    """Say that the target can be called, then answer calls until the collector is gone. Never returns."""
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    write_frame(channel, Ready())
    while body := read_frame(channel):
        call = msgspec.msgpack.decode(body, type=Call)
        write_frame(channel, msgspec.Raw(encoded(reply(target, call))))
    os._exit(0)  # not sys.exit: threads of the user's would be waited for


def reply(target: Any, call: Call) -> Reply:
    """One call; whatever it raises, `sys.exit()` included, becomes a fault."""
    try:
        return Reply(getattr(target, call.method)(*call.arguments))
    except Unusable as error:
        return Reply(fault="invalid", detail=str(error))
    except BaseException as error:
        return Reply(fault="raised", detail=last_line(error))


def encoded(answer: Reply) -> bytes:
    try:
        body = msgspec.msgpack.encode(answer)
    except Exception as error:  # TypeError, OverflowError, RecursionError, UnicodeEncodeError
        body = msgspec.msgpack.encode(Reply(fault="invalid", detail=f"what was returned cannot be sent: {error}"))
    if len(body) > LARGEST_REPLY:
        detail = f"what was returned has {len(body)} bytes; {LARGEST_REPLY} can be sent"
        body = msgspec.msgpack.encode(Reply(fault="invalid", detail=detail))
    return body


def restore_signals() -> None:
    """As a fresh process has them, whatever the process that forked this one does on a signal."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)


if __name__ == "__main__":
    main()
