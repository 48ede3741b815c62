"""The process of one sink: passes metrics.jsonl on while it grows. `python -m asyncrl.runtime.sink_process < request`.

A sink may be slow, hang, raise, or take its process with it. None of that reaches training from here: the file is the
queue between the two, so nothing that trains ever waits for a sink, nor is anything dropped while the run goes on.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from asyncrl.config.recipe import Wandb
from asyncrl.runtime import signals
from asyncrl.runtime.tail import JsonLines
from asyncrl.telemetry.sinks.base import Sink, point

POLL_S = 0.5
CLOSE_S = 15.0
"""From the end of the run: to catch up and to close."""

SAID = 3
"""Exit code of a sink that did not work and has said why."""

MARK = "asyncrl: "
"""Begins the lines of the log that are meant for the person who watches the run."""


class Request(msgspec.Struct):
    """The one line that its parent writes to standard input."""

    sink: Literal["wandb", "tensorboard"]
    folder: str
    offset: int  # bytes of metrics.jsonl that an earlier start has passed on
    wandb: Wandb | None
    recipe: dict[str, Any]  # without passwords


class Courier:
    """Brings records from the file to the sink. `work` runs in a thread, since a sink may block."""

    def __init__(self, open_sink: Callable[[], Sink], lines: JsonLines) -> None:
        self.stop = threading.Event()
        self._open_sink = open_sink
        self._lines = lines
        self._taken = 0  # records that were read and not passed on yet

    def work(self) -> None:
        """Until `stop` is set and everything written before it is delivered. Raises what the sink raises."""
        sink = self._open_sink()
        last = False
        while not last:
            last = self.stop.is_set()  # before reading: what was written until then is still delivered
            records = self._lines.read()
            self._taken = len(records)
            for record in records:
                if (found := point(record)) is not None:
                    sink.log(found)
                self._taken -= 1
            if not last:
                self.stop.wait(POLL_S)
        sink.close()

    def missing(self) -> int:
        """Records that were not delivered; only of use once `work` is stuck or over."""
        return self._taken + len(self._lines.read())


async def pass_on(courier: Courier, stop: asyncio.Event, *, close_s: float, say: Callable[[str], None]) -> int:
    """Let the courier work until `stop`, then `close_s` seconds more. Says what went wrong, in one line; 0: nothing."""
    working = asyncio.create_task(asyncio.to_thread(courier.work))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    courier.stop.set()
    await asyncio.wait({working}, timeout=close_s)
    if not working.done():
        missing = courier.missing()
        what = f"{missing} records were not delivered" if missing else "it did not close"
        say(f"{what} within {close_s:.0f} s of the end of the run; metrics.jsonl has everything")
        return SAID
    if (error := working.exception()) is not None:
        reason = str(error).strip().partition("\n")[0]
        say(f"{type(error).__name__}: {reason}; it gets nothing more, metrics.jsonl has everything")
        return SAID
    return 0


def open_sink(request: Request, say: Callable[[str], None]) -> Sink:
    """The sink itself, for a process that does nothing else; imports its package."""
    folder = Path(request.folder)
    if request.sink == "tensorboard":
        # tensorboardX loads torch where it is installed, for tensors it never gets here: seconds and 250 MB.
        sys.modules["torch"] = None  # type: ignore[assignment]
        from asyncrl.telemetry.sinks.tensorboard import TensorboardSink

        return TensorboardSink(folder)
    from asyncrl.telemetry.sinks.wandb import WandbSink

    return WandbSink(request.wandb or Wandb(), folder=folder, recipe=request.recipe, say=say)


def say(line: str) -> None:
    """A line for the person who watches the run."""
    sys.stdout.write(f"{MARK}{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Serve the sink that the line on standard input describes until standard input ends, or until SIGTERM."""
    request = msgspec.json.decode(sys.stdin.buffer.readline(), type=Request)
    lines = JsonLines(Path(request.folder) / "metrics.jsonl")
    lines.offset = request.offset
    courier = Courier(partial(open_sink, request, say), lines)

    async def work(stop: asyncio.Event) -> int:
        loop = asyncio.get_running_loop()

        def until_the_run_ends() -> None:
            sys.stdin.buffer.read()
            loop.call_soon_threadsafe(stop.set)

        threading.Thread(target=until_the_run_ends, daemon=True).start()
        code = await pass_on(courier, stop, close_s=CLOSE_S, say=say)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a stuck thread, or what the sink's package left running, is not waited for

    signals.run(work, grace_s=2 * CLOSE_S)


if __name__ == "__main__":
    main()
