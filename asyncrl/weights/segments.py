"""Files in shared memory that hold weights: who owns them, who reads them, and what removes them when the owner dies.

The kernel keeps both facts, as locks, and drops them however a process ends:

- the owner holds an exclusive lock on each of its files: one that can be taken proves that the owner is dead, and the
  next owner on the host removes the file (`sweep`);
- a reader holds a shared lock on the file's companion, `NAME.readers`, while it copies or serves from it: the owner
  overwrites only what it can lock there exclusively. A reader that is stopped keeps its version as long as it lives.

A lock also orders memory: what the owner wrote before it unlocked is seen by whoever locks after that.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import tempfile
import threading
from pathlib import Path

import xxhash

from asyncrl.weights.base import WeightsError, WeightsGone

MAGIC = b"asyncrlW"
"""The first bytes of every segment that was ever written to."""

NAME = re.compile(r"asyncrl-[0-9a-f]{8}-[0-9]+-[0-9a-f]{8}")  # run's hash, owner's process id, random
READERS = ".readers"


class Segment:
    """One file of its owner, open and locked. `sequence` is of what it holds; odd: of nothing."""

    def __init__(self, path: Path, fd: int, readers_fd: int) -> None:
        self.path = path
        self.fd = fd
        self.sequence = 0
        self._readers_fd = readers_fd
        self._mapped: mmap.mmap | None = None
        self._users = 0  # in this process: senders that read what it holds
        self._taken = self._removed = False
        self._guard = threading.Lock()  # senders come and go in threads of their own

    def take(self) -> bool:
        """Whether it may be overwritten now: nobody reads it. Until `give` nobody can begin."""
        with self._guard:
            self._taken = self._users == 0 and _lock(self._readers_fd)
            return self._taken

    def give(self) -> None:
        """What was taken may be read again."""
        with self._guard:
            self._taken = False
            if not self._removed:
                fcntl.flock(self._readers_fd, fcntl.LOCK_UN)

    def retain(self, sequence: int) -> None:
        """Begin to read, in this process. Raises WeightsGone if it holds something else by now, or is about to."""
        with self._guard:
            if self._removed or self._taken or self.sequence != sequence:
                raise WeightsGone(f"{self.path} has been removed, or gets another version")
            self._users += 1

    def release(self) -> None:
        """End what `retain` began; in any thread."""
        with self._guard:
            self._users -= 1

    def mapping(self) -> mmap.mmap:
        """The file as it is now, in memory: the same mapping until it has grown. All its pages exist, since they were
        written by calls: storing to them cannot fail for lack of memory. Raises WeightsGone once it is removed."""
        with self._guard:
            if self._removed:
                raise WeightsGone(f"{self.path} has been removed")
            size = os.fstat(self.fd).st_size
            if self._mapped is None or len(self._mapped) < size:
                self._mapped = mmap.mmap(self.fd, size)
            return self._mapped

    def remove(self) -> None:
        """Unlink and unlock. Who has the file open or mapped keeps it until he closes it."""
        with self._guard:
            self._removed, self._mapped = True, None
            unlink(self.path)
            os.close(self.fd)
            os.close(self._readers_fd)


def segment_folder() -> Path:
    """/dev/shm where the system has it, else the temporary folder (macOS: a young file's pages are memory as well)."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def create(folder: Path, run: str) -> Segment:
    """A new, empty, locked segment that only this user may read. Raises WeightsError if sweepers keep removing it,
    OSError."""
    stem = f"asyncrl-{xxhash.xxh3_64_hexdigest(run.encode())[:8]}-{os.getpid()}"
    for _ in range(16):
        path = folder / f"{stem}-{secrets.token_hex(4)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        # A sweeper may come between creation and lock: it then holds the lock, or has removed the file already.
        if _lock(fd) and os.fstat(fd).st_nlink == 1:
            try:
                return Segment(path, fd, os.open(f"{path}{READERS}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            except OSError:
                unlink(path)
                os.close(fd)
                raise
        os.close(fd)
    raise WeightsError(f"no segment could be created in {folder}: other processes keep removing new files there")


def unlink(path: Path) -> None:
    """Remove a segment's two names. The companion first: it is found only by the segment's own name."""
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
        if not NAME.fullmatch(path.name.removesuffix(READERS)):
            continue  # the folder may be the temporary one: touch nothing that only looks alike
        if path.name.endswith(READERS):
            if not path.with_name(path.name.removesuffix(READERS)).exists():
                path.unlink(missing_ok=True)  # the segment comes first and goes last: somebody removed it by hand
            continue
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
