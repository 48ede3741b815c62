"""One child process of a run: its command, its log, its end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from asyncrl.runtime import tether
from asyncrl.runtime.tail import last_lines

TAIL = 12
"""Log lines that are shown when a process failed."""


def how_it_ended(code: int) -> str:
    """An exit code of `Child.exited` in words.

    >>> how_it_ended(-15), how_it_ended(3)
    ('was killed by SIGTERM', 'ended with code 3')
    """
    if code >= 0:
        return f"ended with code {code}"
    # Nobody says why; where no person did it, it was the kernel, which takes the largest process.
    guess = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{guess}"


class Child:
    """`asyncrl ARGUMENTS` (or another module of ours) as a process in a session of its own, whose output goes to `log`.

    A session of its own, since Ctrl-C reaches a whole foreground group at once, while a run ends in an order: the
    learner's checkpoint needs the store. Its process group (verifiers included) is what `kill` ends.
    """

    def __init__(self, name: str, arguments: Sequence[str], *, log: Path, module: str = "asyncrl.cli.main") -> None:
        self.name = name
        self._module = module
        self.log = log
        self._arguments = arguments
        self._process: Process | None = None
        self._exited: asyncio.Task[int] | None = None
        self._log_start = 0  # bytes of the log that earlier starts wrote

    @property
    def exited(self) -> asyncio.Task[int]:
        """Done when the process has ended; its result is the exit code (negative: the signal that ended it)."""
        assert self._exited is not None, f"{self.name} was not started"
        return self._exited

    @property
    def started(self) -> bool:
        return self._exited is not None

    @property
    def running(self) -> bool:
        return not self.exited.done()

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    async def start(
        self,
        environment: Mapping[str, str],
        *,
        stdin: bytes | None = None,
        hold: bool = False,
        inherits: Sequence[int] = (),
    ) -> None:
        """Start it, or start it again; `environment` adds to ours, `stdin` is all that it may read.

        `hold`: its standard input ends at `close_stdin`, not at once. That reaches it in whatever state it is, while a
        signal ends a process that is still importing what would handle it. `inherits`: open files it gets besides.
        """
        # -P: a folder in the working directory that is named like a package must not be imported instead of it.
        argv = tether.command([sys.executable, "-P", "-m", self._module, *self._arguments])
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
                start_new_session=True,
                pass_fds=inherits,
            )
        self._exited = asyncio.create_task(self._process.wait(), name=f"exit of {self.name}")
        if stdin is not None:
            assert self._process.stdin is not None
            with suppress(BrokenPipeError, ConnectionResetError):  # it ended at once; its log says why
                self._process.stdin.write(stdin)
                await self._process.stdin.drain()
                if not hold:
                    self._process.stdin.close()

    def close_stdin(self) -> None:
        """End the standard input that was held; for a process that takes this as the end of its work."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def terminate(self) -> None:
        """Ask it to stop."""
        if self._process is not None and self.running:
            # Not Process.terminate: it asks first whether the process has ended, and so takes the exit code away from
            # the event loop, which then reports 255.
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    async def ended(self, within_s: float) -> bool:
        """Wait for its end; whether it came in time."""
        done, _ = await asyncio.wait({self.exited}, timeout=within_s)
        return bool(done)

    async def kill(self) -> None:
        """End what is left of it and of its own children. Safe where it has ended, or was never started."""
        if self._process is None:
            return
        self.signal_group(signal.SIGKILL)
        await self.exited

    def signal_group(self, number: signal.Signals) -> None:
        """Send it and its own children a signal; what has ended gets none."""
        with suppress(ProcessLookupError, PermissionError):  # nothing is left of the group
            os.killpg(self.pid, number)

    def complaint(self) -> str:
        """The message it ended with, "" if it said none: what it printed after its last "Error: "."""
        lines = last_lines(self.log, TAIL, offset=self._log_start)
        starts = [n for n, line in enumerate(lines) if line.startswith("Error: ")]
        return "\n".join(lines[starts[-1] :]).removeprefix("Error: ") if starts else ""

    def last_words(self) -> str:
        """For the person who asks why: its message and where its log is; without one, the end of the log."""
        if complaint := self.complaint():
            return f"{complaint}\nIts log: {self.log}"
        ended = "is running" if self.running else how_it_ended(self.exited.result())
        lines = (f"  {line}" for line in last_lines(self.log, TAIL, offset=self._log_start))
        return "\n".join([f"{self.name} {ended}; the last lines of {self.log}:", *lines])
