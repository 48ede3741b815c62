"""The bytes of a data file: of a small one in memory, of a large one where they are, and never changed on the way."""

from __future__ import annotations

import os
import weakref
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from asyncrl.data.errors import DataError

SMALL = 32 << 20
"""Bytes of files that are held in memory as they are, and read in a few hundredths of a second; nothing is kept of
them."""


class Room:
    """What the files of one data set may hold in memory together: a data set may come in a thousand small ones."""

    def __init__(self) -> None:
        self.left = SMALL

    def take(self, size: int) -> bool:
        """Whether a file of so many bytes has room; it has it then."""
        if size > self.left:
            return False
        self.left -= size
        return True


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
        self._seen = _seen(path)
        self.size = self._seen[0]

    def read(self, start: int, stop: int) -> bytes:
        try:
            file = _opened(self._path, self._seen).number
            data = os.pread(file, stop - start, start)
            changed = len(data) < stop - start or _seen(file) != self._seen
        except FileNotFoundError:
            changed = True
        if changed:
            raise _changed(self._path)
        return data


class Watched:
    """Tells of a file whether it is as it was."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        self._seen = _seen(path)

    def check(self) -> None:
        """Raises DataError for one that has changed since, or gone."""
        try:
            if _seen(self.path) == self._seen:
                return
        except OSError:
            pass
        raise _changed(self.path)


class _Open:
    """An open file, closed when nobody has it any more."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.number)


@lru_cache(maxsize=128)  # of a data set in a thousand files not all can be open, by the limit of most systems
def _opened(path: Path, _seen: tuple[int, int]) -> _Open:
    """What `path` names, opened anew once another file has its name."""
    return _Open(path)


def _changed(path: Path) -> DataError:
    return DataError(f"{path} was changed while it was in use: keep data files as they are, and start anew")


def _seen(file: int | Path) -> tuple[int, int]:
    found = os.stat(file)
    return found.st_size, found.st_mtime_ns
