"""Folders of sandboxed programs: made, measured, and removed whatever was left in them."""

from __future__ import annotations

import fcntl
import itertools
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PREFIX = "asyncrl-sandbox-"
ENTRIES = 1000  # that a program may leave
YOUNG_S = 60.0  # between making a folder and locking it there are microseconds


class Folders:
    """One folder for each program, all in one that is locked as long as this process lives. What one that was killed
    could not remove, the next removes."""

    def __init__(self) -> None:
        self._home = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = os.open(self._home, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._home.chmod(0o711)  # nobody must come through
        self._numbers = itertools.count()
        remove_abandoned(self._home.parent)

    def new(self, user: int | None) -> Path:
        """An empty folder, which belongs to that user (None: this one)."""
        folder = self._home / str(next(self._numbers))
        folder.mkdir(mode=0o700)
        if user is not None:
            with suppress(OSError):  # where no other user is mapped, none is become either
                os.chown(folder, user, user)
        return folder

    def close(self) -> None:
        remove(self._home)
        os.close(self._lock)


def remove_abandoned(place: Path) -> None:
    """Remove the folders of this user's whose processes are dead."""
    for found in place.glob(PREFIX + "*"):
        with suppress(OSError):
            lock = os.open(found, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
            try:
                state = os.fstat(lock)  # not of the path: in a folder for all, only an owner can put another one there
                if state.st_uid != os.getuid() or time.time() - state.st_mtime < YOUNG_S:
                    continue
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if its process lives
                remove(found)
            finally:
                os.close(lock)


def remove(folder: Path) -> None:
    """Remove a folder and all in it. However deep it is: folders in it are moved up, not descended into, so that no
    path becomes too long and nothing recurses; and whatever its modes and names are."""
    numbers = itertools.count()
    pending = [folder]
    while pending:
        inner = pending.pop()
        inner.chmod(0o700)
        with os.scandir(inner) as found:
            entries = list(found)  # all, before this folder itself gets new ones
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)  # a folder that is moved is written to
                while os.path.lexists(moved := folder / f".{next(numbers)}.removed"):
                    pass  # a name that the program has taken
                os.rename(entry.path, moved)
                pending.append(moved)
            else:
                os.unlink(entry.path)
        if inner != folder:
            inner.rmdir()
    folder.rmdir()


def usage(folder: Path) -> float:
    """Bytes in a folder that is being written to; infinite if that cannot be counted or is more than ENTRIES files."""
    total, count = 0, 0
    pending = [str(folder)]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    count += 1
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    with suppress(FileNotFoundError):
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if count > ENTRIES:
                        return float("inf")
        except FileNotFoundError:
            continue
        except OSError:  # too deep, or closed to its own user
            return float("inf")
    return total


def held(pid: int, folder: Path, user: int | None, largest: int) -> float:
    """Bytes of a folder's files that have no name any more, but are open in a process, or mapped, were it one page. Of
    those that are only mapped the size cannot be seen: each counts as `largest`. user: whose process it is, None: this
    one's. 0 if it has ended."""
    for acting in dict.fromkeys((None, user)):  # in most containers root may not look, but become who may
        with suppress(OSError), _acting_as(acting):
            return _held(pid, folder, largest)
    return 0.0


def _held(pid: int, folder: Path, largest: int) -> float:
    total, seen = 0.0, set()
    device = folder.stat().st_dev
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            state = os.stat(f"/proc/{pid}/fd/{number}")
            if stat.S_ISREG(state.st_mode) and not state.st_nlink and state.st_dev == device:
                seen.add(str(state.st_ino))
                total += state.st_blocks * 512
    place = os.fsencode(os.path.realpath(folder)) + b"/"
    with open(f"/proc/{pid}/maps", "rb") as lines:
        for line in lines:
            if line.endswith(b" (deleted)\n") and place in line:
                node = line.split()[4].decode()
                total += 0 if node in seen else largest
                seen.add(node)
    return total


@contextmanager
def _acting_as(user: int | None) -> Iterator[None]:
    if user is None:
        yield
        return
    with ExitStack() as back:
        back.callback(os.setegid, os.getegid())
        os.setegid(user)
        back.callback(os.seteuid, os.geteuid())
        os.seteuid(user)
        yield
