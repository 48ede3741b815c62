"""Files in shared memory that hold weights: who owns them, who reads them, and what removes them when the owner dies.

The kernel keeps both facts, as locks, and drops them however a process ends:

- the owner holds an exclusive lock on each of its files: one that can be taken proves that the owner is dead, and the
  next owner on the host removes the file (`sweep`);
- a reader holds a shared lock on the file's companion, `NAME.readers`, while it copies or serves from it: the owner
  overwrites only what it can lock there exclusively. A reader that is stopped keeps its version as long as it lives.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path

import xxhash

from asyncrl.staleness import Weights
from asyncrl.weights.base import WeightsError

MAGIC = b"asyncrlW"
"""The first bytes of every segment that was ever written to."""

NAME = re.compile(r"asyncrl-[0-9a-f]{8}-[0-9]+-[0-9a-f]{8}")  # run's hash, publisher's process id, random
READERS = ".readers"


@dataclass(slots=True)
class Segment:
    """One file of its owner, open and locked. `holds` is None before the first version and while one is written."""

    path: Path
    fd: int
    readers_fd: int
    sequence: int = 0
    holds: Weights | None = None
    users: int = 0  # in this process: senders that read what it holds

    def take(self) -> bool:
        """Whether it may be overwritten now: nobody reads it. Until `give` no reader can begin."""
        return self.users == 0 and _lock(self.readers_fd)

    def give(self) -> None:
        """What was taken may be read again."""
        fcntl.flock(self.readers_fd, fcntl.LOCK_UN)


def segment_folder() -> Path:
    """/dev/shm where the system has it, else the temporary folder (macOS: a young file's pages are memory as well)."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def create(folder: Path, run: str) -> Segment:
    """A new, empty, locked segment that only this user may read. Raises WeightsError if sweepers keep removing it."""
    stem = f"asyncrl-{xxhash.xxh3_64_hexdigest(run.encode())[:8]}-{os.getpid()}"
    for _ in range(16):
        path = folder / f"{stem}-{secrets.token_hex(4)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        # A sweeper may come between creation and lock: it then holds the lock, or has removed the file already.
        if _lock(fd) and os.fstat(fd).st_nlink == 1:
            return Segment(path, fd, os.open(f"{path}{READERS}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        os.close(fd)
    raise WeightsError(f"no segment could be created in {folder}: other processes keep removing new files there")


def remove(segment: Segment) -> None:
    """Unlink and unlock. A reader that has the file open or mapped keeps it until it closes it."""
    unlink(segment.path)
    os.close(segment.fd)
    os.close(segment.readers_fd)


def unlink(path: Path) -> None:
    """Remove a segment's two names."""
    Path(f"{path}{READERS}").unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def read_lock(path: Path) -> int | None:
    """A file descriptor that keeps the segment at `path` from being overwritten until it is closed; None while it is
    being written. Raises FileNotFoundError if it is gone."""
    fd = os.open(f"{path}{READERS}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def sweep(folder: Path) -> list[Path]:
    """Remove the segments of dead owners. Returns what was removed."""
    removed: list[Path] = []
    for path in sorted(folder.glob("asyncrl-*")):
        if not NAME.fullmatch(path.name):
            continue  # the folder may be the temporary one: touch nothing that only looks alike
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or removed by its owner since
        try:
            if os.pread(fd, len(MAGIC), 0) in (b"", MAGIC) and _lock(fd):
                unlink(path)
                removed.append(path)
        finally:
            os.close(fd)
    return removed


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
