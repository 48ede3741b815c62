"""The bytes of a data file: of a small one in memory, of a large one where they are, and never changed on the way."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Protocol

from asyncrl.data.errors import DataError

SMALL = 32 << 20
"""Bytes of a file that is held in memory as it is, and read in a few hundredths of a second; nothing is kept of it."""


class Content(Protocol):
    """Bytes by their place."""

    size: int

    def read(self, start: int, stop: int) -> bytes:
        """Raises DataError for a file that has changed since."""


class Held:
    """Bytes in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read(self, start: int, stop: int) -> bytes:
        return self._data[start:stop]


class OnDisk:
    """Bytes of a file, read where they are wanted. Read, not mapped: of a file that somebody shortens, a mapping ends
    the process with SIGBUS."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self._seen = _seen(self._file)
        self.size = self._seen[0]

    def read(self, start: int, stop: int) -> bytes:
        data = os.pread(self._file, stop - start, start)
        if len(data) < stop - start or _seen(self._file) != self._seen:
            raise DataError(
                f"{self._path} was changed while it was in use: keep data files as they are, and start anew"
            )
        return data


def _seen(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_size, found.st_mtime_ns
