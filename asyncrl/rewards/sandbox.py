"""Runs programs that a model wrote: shut in, limited, and gone with all that they started (`docs/security.md`).

```python
with Sandbox(memory_bytes=512 << 20) as sandbox:
    ended = sandbox.run("print(int(input()) + 1)", "41", limit_s=4.0)  # stdout "42\\n"
    ended = sandbox.test("def f(n): return n + 1", [["call", "f(41)", 42]], limit_s=4.0, total_s=8.0)
```

A program is a Python script. With tests it is a module, whose functions the tests call from a process of their own
(`sandbox_calls.py`). There is no key to take a wall away: where this machine cannot put one up, nothing is run.
"""

from __future__ import annotations

import json
import os
import site
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import asyncrl
from asyncrl.rewards.sandbox_walls import WALLS, check
from asyncrl.rewards.sandbox_zygote import Run, Settings, read_frame, write_frame

START_LIMIT_S = 60.0  # most of it for modules that a recipe names
ANSWER_LIMIT_S = 30.0  # beyond a program's own limit, to kill it and clear up on a busy machine
END_LIMIT_S = 5.0
TAIL_BYTES = 4096  # of standard error

BOOT = """
import sys
sys.path.insert(0, sys.argv[2])
from asyncrl.rewards.sandbox_zygote import main
del sys.path[0]
main()
"""

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "TZ": "UTC"}
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}  # else glibc reserves 64 MiB of address space, which is limited, for each thread
SAME_HASHES = {"PYTHONHASHSEED": "0"}  # an answer that depends on the order of a set gets the same score each time


class SandboxError(Exception):
    """A program could not be run, for no fault of its own. One or two lines."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended.

    reason: the limit that ended it, "" if none: `timeout`, `memory`, `output_flood`, `disk_flood`, `thread_flood`.
    code: exit code, minus a signal's number, or None if it was killed for the reason or because its tests were done.
    records: with tests, class and detail of what is wrong, first of what the answer's own code is, then for each test
    that ran; the last may be of the class `gone`: the answer's process did not answer any more.
    """

    reason: str
    code: int | None
    stdout: str
    stderr: str
    records: tuple[tuple[str, str], ...] = ()


class Sandbox:
    """One program at a time. Not for several threads."""

    def __init__(
        self, *, memory_bytes: int, modules: Sequence[str] = (), _without: frozenset[str] = frozenset()
    ) -> None:
        """Start the process that programs are forked from. Raises Unprotected on a machine that cannot shut them in,
        SandboxError if a module cannot be imported.

        memory_bytes: that a program may have beyond the interpreter's. modules: of this environment, imported once.
        _without: walls that are left out, in the controls of tests.
        """
        check()
        path = [*site.getsitepackages(), *sys.path] if modules else []
        path = [entry for entry in dict.fromkeys(path) if os.path.isdir(entry) and entry.endswith("-packages")]
        self._settings = Settings(list(modules), path, memory_bytes, sorted(WALLS - _without))
        self._process: subprocess.Popen[bytes] | None = None
        self._commands: socket.socket | None = None
        self._start()
        try:
            self.run("", "", limit_s=START_LIMIT_S)  # its walls stand
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int | None:
        """Of the process that programs are forked from."""
        return None if self._process is None else self._process.pid

    def run(self, source: str, stdin: str, *, limit_s: float) -> Ended:
        """Run a script. Raises SandboxError."""
        return self._run(source, stdin, Run(tested=False, limit_s=limit_s, total_s=limit_s))

    def test(self, source: str, items: Sequence[Sequence[Any]], *, limit_s: float, total_s: float) -> Ended:
        """Run a module and tests of it (`sandbox_tests.run_tests`). limit_s: for what the module does by itself, and
        for each test. Raises SandboxError."""
        return self._run(source, json.dumps(items), Run(tested=True, limit_s=limit_s, total_s=total_s))

    def close(self) -> None:
        """End the process, and with it what it runs."""
        if self._commands is not None:
            self._commands.close()
            self._commands = None
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_LIMIT_S)
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait(END_LIMIT_S)
            self._process = None

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        home = str(Path(asyncrl.__file__).parents[1])
        libraries = {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-S", "-B", "-c", BOOT, str(theirs.fileno()), home],
                env={
                    **ENVIRONMENT,
                    **ONE_THREAD,
                    **ONE_ARENA,
                    **SAME_HASHES,
                    **libraries,
                    "TMPDIR": tempfile.gettempdir(),
                },
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # it outlives this process to clear up, whoever kills its group
            )
        self._commands = ours
        ours.settimeout(START_LIMIT_S)
        try:
            complaint = self._exchange(self._settings, ())
        except SandboxError:
            self.close()
            raise
        if complaint:
            self.close()
            raise SandboxError(complaint)

    def _run(self, source: str, given: str, run: Run) -> Ended:
        if self._commands is None:
            self._start()
        if self._commands is None:
            raise SandboxError("the sandbox is closed")
        with ExitStack() as files:
            names = ("source", "input", "output", "errors", "records")
            memory = [os.memfd_create(name) for name in names]
            for descriptor in memory:
                files.callback(os.close, descriptor)
            for descriptor, text in zip(memory, (source, given), strict=False):
                with open(descriptor, "wb", closefd=False) as file:
                    file.write(text.encode("utf-8", "replace"))
            # Opened for reading, and each with a place of its own.
            readable = [os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY) for descriptor in memory[:2]]
            for descriptor in readable:
                files.callback(os.close, descriptor)
            self._commands.settimeout(run.total_s + ANSWER_LIMIT_S)
            try:
                found = self._exchange(run, [*readable, *memory[2:]])
            except SandboxError:
                self.close()  # the next program gets a new one
                raise
            output, errors, records = (_content(descriptor) for descriptor in memory[2:])
        if found["failed"]:
            raise SandboxError(f"the sandbox did not run a program: {found['failed']}")
        return Ended(
            found["reason"],
            found["code"],
            output.decode(errors="replace"),
            errors[-TAIL_BYTES:].decode(errors="replace"),
            tuple((wrong, detail) for wrong, detail in map(json.loads, records.splitlines())),
        )

    def _exchange(self, message: object, descriptors: Sequence[int]) -> Any:
        if self._commands is None:
            raise SandboxError("the sandbox is closed")
        try:
            write_frame(self._commands, message, descriptors)
            body, _ = read_frame(self._commands)
        except OSError as error:  # a TimeoutError too
            raise SandboxError(f"the sandbox's process does not answer: {type(error).__name__}: {error}") from None
        if not body:
            raise SandboxError("the sandbox's process has ended: see what it said above")
        return json.loads(body)


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
