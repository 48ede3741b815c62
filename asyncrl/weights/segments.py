"""Files in shared memory that hold weights: where they lie, who owns them, and what removes them when the owner dies.

The owner keeps an exclusive lock on each of its files. The kernel drops it however the process ends, so a lock that can
be taken proves that the owner is dead; the next publisher on the host then removes the file (`sweep`).
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


@dataclass(slots=True)
class Segment:
    """One file of its owner, open and locked. `holds` is None before the first version and while one is written."""

    path: Path
    fd: int
    sequence: int = 0
    holds: Weights | None = None


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
            return Segment(path, fd)
        os.close(fd)
    raise WeightsError(f"no segment could be created in {folder}: other processes keep removing new files there")


def remove(segment: Segment) -> None:
    """Unlink and unlock. A reader that has the file open keeps it until it closes it."""
    segment.path.unlink(missing_ok=True)
    os.close(segment.fd)


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
                path.unlink(missing_ok=True)
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
