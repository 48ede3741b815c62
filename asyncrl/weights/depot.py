"""Folders of files that versions of the weights are put into and fetched from: a path, or any URL that fsspec knows.

Both kinds keep one promise, that a folder whose `COMMIT` file can be read is complete:

- on a file system, it is written under another name and renamed once everything is on the disk;
- on an object store, that file is the last to be written.

Nothing is removed but files of names the caller gives, and folders that are then empty.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from asyncrl.weights.base import WeightsError
from asyncrl.weights.image import FULL

COMMIT = "manifest.json"
"""The file that makes a folder complete."""

DRAFT = "writing-"
"""What a folder's name begins with while it is written."""

PIECE = 64 * 2**20
"""Bytes that are read or written between two looks at the clock."""

Parts = Iterable[bytes | memoryview]
"""The content of a file, in pieces."""


class Depot(Protocol):
    """Where versions lie: folders of files, one level deep. Names are relative. FileNotFoundError: it is not there, any
    more; all other trouble is a WeightsError that names the file."""

    url: str  # as others find it

    def prepare(self) -> None:
        """Make sure that something can be written here."""

    def put(self, folder: str, files: Mapping[str, Parts]) -> None:
        """Write a complete folder; `COMMIT` must be the last of `files`. None of that name may be there."""

    def replace(self, name: str, content: bytes) -> None:
        """Write a small file in one stroke."""

    def content(self, name: str) -> bytes:
        """All of a small file."""

    def size(self, name: str) -> int:
        """Bytes of a file."""

    def read(self, name: str, start: int, into: memoryview) -> int:
        """Fill `into` with what the file has from `start` on; how many bytes that was: less, only at its end. Of a file
        that does not change."""

    def names(self, folder: str = "") -> list[str]:
        """What lies in a folder; [] if it does not exist."""

    def remove(self, folder: str, files: Iterable[str]) -> bool:
        """Remove these files and then, if it is empty, the folder. Whether it is gone."""


def open_depot(url: str, *, writer: str = "") -> Depot:
    """`url` as in the recipe. writer: what tells apart who writes there at the same time; "": only reads.

    Raises WeightsError: fsspec does not know such a URL, or lacks the package for it.
    """
    try:
        system, path = url_to_fs(url, use_listings_cache=False)  # type: ignore[no-untyped-call]
    except (ImportError, ValueError) as error:
        raise WeightsError(
            f"weights.url {url!r}: {error}. A path or a URL that fsspec knows is needed; for s3:// install s3fs, for "
            "gs:// gcsfs, for abfs:// adlfs, on the learner and on each collector"
        ) from error
    if isinstance(system, LocalFileSystem):
        return LocalDepot(Path(path), writer)
    return RemoteDepot(system, path, url)


class LocalDepot:
    """On a file system, this host's or a shared one."""

    def __init__(self, root: Path, writer: str) -> None:
        self.url = str(root)
        self._draft = DRAFT + writer
        self._root = root

    def prepare(self) -> None:
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            probe = self._root / self._draft
            probe.mkdir()
            probe.rmdir()
        except OSError as error:
            raise self._failed("weights cannot be written there", error) from error

    def put(self, folder: str, files: Mapping[str, Parts]) -> None:
        draft = self._root / self._draft
        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            for name, parts in files.items():
                with open(draft / name, "xb", buffering=0) as file:
                    for part in _pieces(parts):
                        while part:
                            part = part[file.write(part) :]
                    os.fsync(file.fileno())
            _sync(draft)
            draft.rename(self._root / folder)
            _sync(self._root)
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise self._failed(f"{folder} cannot be written", error) from error
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def replace(self, name: str, content: bytes) -> None:
        draft = self._root / f"{self._draft}.{name}"
        try:
            with open(draft, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._root / name)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise self._failed(f"{name} cannot be written", error) from error

    def content(self, name: str) -> bytes:
        with self._reading(name):
            return (self._root / name).read_bytes()

    def size(self, name: str) -> int:
        with self._reading(name):
            return (self._root / name).stat().st_size

    def read(self, name: str, start: int, into: memoryview) -> int:
        filled = 0
        with self._reading(name), open(self._root / name, "rb", buffering=0) as file:
            file.seek(start)
            while filled < len(into) and (count := file.readinto(into[filled:])):
                filled += count
        return filled

    def names(self, folder: str = "") -> list[str]:
        try:
            with self._reading(folder):
                return sorted(os.listdir(self._root / folder))
        except FileNotFoundError:
            return []

    def remove(self, folder: str, files: Iterable[str]) -> bool:
        for name in _commit_first(files):
            with contextlib.suppress(OSError):  # another's, or removed by another: the folder then says so
                (self._root / folder / name).unlink()
        with contextlib.suppress(OSError):
            (self._root / folder).rmdir()
        return not (self._root / folder).exists()

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._failed(f"{name} cannot be read", error) from error

    def _failed(self, what: str, error: OSError) -> WeightsError:
        full = error.errno in FULL
        advice = "it is full: three versions and the one that is written must fit" if full else str(error.strerror)
        return WeightsError(f"{self._root}: {what}: {advice}")


class RemoteDepot:
    """On anything else: an object store, or memory."""

    def __init__(self, system: Any, root: str, url: str) -> None:
        self.url = url
        self._system = system
        self._root = root.rstrip("/")
        # What was read last: name, first byte, content. Tensors are read one after the other, and many are smaller than
        # what a request costs.
        self._ahead: tuple[str, int, bytes] = ("", 0, b"")

    def prepare(self) -> None:
        with self._reported("weights cannot be written there"):
            self._system.makedirs(self._root, exist_ok=True)

    def put(self, folder: str, files: Mapping[str, Parts]) -> None:
        with self._reported(f"{folder} cannot be written"):
            self._system.makedirs(self._path(folder), exist_ok=True)
        for name, parts in files.items():
            with (
                self._reported(f"{folder}/{name} cannot be written"),
                self._system.open(self._path(f"{folder}/{name}"), "wb") as file,
            ):
                for part in _pieces(parts):
                    file.write(part)

    def replace(self, name: str, content: bytes) -> None:
        with self._reported(f"{name} cannot be written"):
            self._system.pipe_file(self._path(name), content)

    def content(self, name: str) -> bytes:
        with self._reported(f"{name} cannot be read"):
            return bytes(self._system.cat_file(self._path(name)))

    def size(self, name: str) -> int:
        with self._reported(f"{name} cannot be read"):
            return int(self._system.info(self._path(name))["size"])

    def read(self, name: str, start: int, into: memoryview) -> int:
        filled = 0
        while filled < len(into):
            ahead, begin, content = self._ahead
            at = start + filled - begin
            if ahead != name or not 0 <= at < len(content):
                with self._reported(f"{name} cannot be read"):
                    content = self._system.cat_file(self._path(name), start=start + filled, end=start + filled + PIECE)
                self._ahead, at = (name, start + filled, content), 0
                if not content:
                    break
            part = content[at : at + len(into) - filled]
            into[filled : filled + len(part)] = part
            filled += len(part)
        return filled

    def names(self, folder: str = "") -> list[str]:
        try:
            with self._reported(f"{folder or self._root} cannot be listed"):
                found = self._system.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def remove(self, folder: str, files: Iterable[str]) -> bool:
        for name in _commit_first(files):
            self._remove(f"{folder}/{name}")
        if not self.names(folder):
            with contextlib.suppress(Exception):  # an object store has no folders
                self._system.rmdir(self._path(folder))
        return not self.names(folder)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._reported(f"{name} cannot be removed"):
            self._system.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    @contextlib.contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, WeightsError):
            raise
        except Exception as error:  # each store has exceptions of its own
            raise WeightsError(f"{self.url}: {what}: {type(error).__name__}: {error}") from error


def _pieces(parts: Parts) -> Iterator[memoryview]:
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), PIECE):
            yield view[start : start + PIECE]


def _commit_first(files: Iterable[str]) -> list[str]:
    """Half a folder is none from the beginning of its removal."""
    return sorted(files, key=lambda name: name != COMMIT)


def _sync(folder: Path) -> None:
    """What was renamed or created in it survives a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
