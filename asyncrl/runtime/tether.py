"""Ties a child's life to its parent's: `python -m asyncrl.runtime.tether PARENT_PID -- command ...`.

A parent that is killed with -9 cannot end its children, so the kernel does it (Linux), or a small watcher that stays
between the two (elsewhere). Without this, a killed run leaves a server and two trainers behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

PR_SET_PDEATHSIG = 1
"""<linux/prctl.h>: the signal this process gets when the thread that forked it ends. Survives exec."""

POLL_S = 0.5
"""How often the watcher looks for its parent where the kernel cannot tell."""


def command(argv: Sequence[str]) -> list[str]:
    """`argv`, tied to the calling process. Spawn it from the main thread: on Linux the signal comes when the *thread*
    that forked ends, so a child of a short-lived worker thread would be killed with that thread."""
    return [sys.executable, "-P", "-m", __name__, str(os.getpid()), "--", *argv]


def main() -> None:
    """Become the command (Linux), or run it and watch the parent (elsewhere)."""
    parent = int(sys.argv[1])
    if sys.argv[2] != "--" or len(sys.argv) < 4:
        raise SystemExit("usage: python -m asyncrl.runtime.tether PARENT_PID -- command ...")
    argv = sys.argv[3:]
    if sys.platform == "linux":
        _become(argv, parent)
    raise SystemExit(_watch(argv, parent))


def _become(argv: list[str], parent: int) -> NoReturn:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # A parent that died before prctl took effect sends no signal any more.
    if os.getppid() != parent:
        raise SystemExit(f"the parent {parent} is gone; not starting {argv[0]}")
    os.execvp(argv[0], argv)


def _watch(argv: list[str], parent: int) -> int:
    # close_fds off: what our parent let us inherit (a lock) is meant for the command.
    process = subprocess.Popen(argv, close_fds=False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: process.send_signal(received))
    while (code := process.poll()) is None:
        if os.getppid() != parent:
            process.kill()
            process.wait()
            return 128 + signal.SIGKILL
        time.sleep(POLL_S)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    main()
