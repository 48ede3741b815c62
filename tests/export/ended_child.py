"""`asyncrl export` that is ended by a signal as soon as a phase begins.

    python -m tests.export.ended_child SIGNAL PHASE IN_PLACE ARGUMENTS

IN_PLACE 1: written straight to the target, as the control.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncrl.cli.main import main
from asyncrl.runtime import export


@contextmanager
def in_place(target: Path) -> Iterator[Path]:
    target.mkdir()
    yield target


def run(number: signal.Signals, phase: str, arguments: list[str]) -> None:
    write = export.export

    def ended(*positional: Any, **named: Any) -> export.Exported:
        def on_phase(begun: str) -> None:
            if begun == phase:
                os.kill(os.getpid(), number)

        return write(*positional, **{**named, "on_phase": on_phase})

    export.export = ended
    sys.argv = ["asyncrl", "export", *arguments]
    main()


if __name__ == "__main__":
    if sys.argv[3] == "1":
        export._appearing = in_place
    run(signal.Signals[sys.argv[1]], sys.argv[2], sys.argv[4:])
