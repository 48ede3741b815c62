"""The last words of a vLLM worker. Whoever asks a dead vLLM is told that it is dead, and to look at the log: the error
that ended it, out of memory for one, is known in its own process only."""

from __future__ import annotations

import logging
from pathlib import Path


class LastWords(logging.Handler):
    """Writes the first error that vLLM logs with its exception into a file."""

    def __init__(self, file: Path) -> None:
        super().__init__(logging.ERROR)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info and record.exc_info[1]
        if error and not self._file.exists():
            self._file.write_text(f"{type(error).__name__}: {error}"[:1000])


def said(file: Path) -> str:
    """What was written there; "" if nothing."""
    return file.read_text() if file.exists() else ""
