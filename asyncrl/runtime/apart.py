"""Other people's code in a process of its own: asked once, ended with all that it started, and what it said kept."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from asyncrl.runtime import tether


@dataclass(frozen=True, slots=True)
class Ended:
    """code: the process's exit code, below 0 for a signal. said: all that it wrote to stderr."""

    code: int
    said: str

    @property
    def last(self) -> str:
        """The last line of what it said, which is where Python says what was wrong."""
        return (self.said.strip().splitlines() or ["it said nothing"])[-1]


async def run_apart(module: str, request: Any, *, limit_s: float, arguments: Sequence[str] = ()) -> Ended:
    """`python -m module arguments ... < request`, as JSON. Raises TimeoutError if it has not ended within `limit_s`."""
    # A file, not a pipe: a process that the module started and left behind would keep the pipe open.
    with tempfile.TemporaryFile() as said:
        process = await asyncio.create_subprocess_exec(
            *tether.command([sys.executable, "-P", "-m", module, *arguments]),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(limit_s):
                await process.communicate(msgspec.json.encode(request))
        finally:
            with suppress(ProcessLookupError, PermissionError):  # nothing is left of it and of what it started
                os.killpg(process.pid, signal.SIGKILL)
            code = await process.wait()
        said.seek(0)
        return Ended(code, said.read().decode(errors="replace"))
