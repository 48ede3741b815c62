"""What is made of large data files once and found again: where their rows begin, what examining them said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import xxhash
from filelock import FileLock, Timeout

from asyncrl.config.cache_folder import cache_root
from asyncrl.data.errors import DataError

LOCK_LIMIT_S = 600.0  # another process works through 10 million rows in less; more than this means that it hangs

FORMAT = 4
"""Of everything kept: raise it when any of it changes, or which rows can be used, so that old ones are made again."""

SOURCE = "source.json"
"""What the folder was made of; the last file that is written."""

SIZES = "sizes.json"
"""The bytes of the others: a machine that loses power, or a disk that is full, leaves shorter ones."""


def kept(files: Sequence[Path], what: str, make: Callable[[Path], None]) -> Path:
    """The folder with what `make` (given an empty folder) makes of these files; found again while the files have the
    same size and time of change. Of several processes that call at once one makes it and the others wait.

    Raises DataError: a file is gone, or changed meanwhile, what is made cannot be kept, another process hangs; and what
    `make` raises.
    """
    stamps = _stamps(files)
    source = json.dumps([FORMAT, what, *stamps])
    root = cache_root() / "data"
    folder = root / xxhash.xxh3_128_hexdigest(source.encode())
    if _is_whole(folder):
        return folder
    making = root / f".{folder.name}.making"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{folder.name}.lock", timeout=LOCK_LIMIT_S):
            if _is_whole(folder):
                return folder  # another process made it meanwhile
            # A fixed name, cleared first: only the holder of the lock makes it, and what a killed one left goes away.
            shutil.rmtree(making, ignore_errors=True)
            making.mkdir()
            try:
                make(making)
                if _stamps(files) != stamps:
                    raise DataError(f"{files[0]} was changed while it was read: keep data files as they are")
                (making / SIZES).write_text(json.dumps({path.name: path.stat().st_size for path in making.iterdir()}))
                (making / SOURCE).write_text(source)
                shutil.rmtree(folder, ignore_errors=True)  # one that is not whole
                making.rename(folder)
            finally:
                shutil.rmtree(making, ignore_errors=True)  # a full disk has use for it
            _forget_outdated(root)
    except Timeout:
        raise DataError(
            f"another process has been reading {files[0]} for {LOCK_LIMIT_S:.0f} s; end it, or remove {folder}.lock"
        ) from None
    except OSError as error:
        raise DataError(
            f"what is made of {files[0]} cannot be kept in {root} ({error}): set ASYNCRL_CACHE to a folder that can be "
            "written, on a disk with room for it"
        ) from error
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether it is there with all that was made."""
    try:
        if not (folder / SOURCE).is_file():
            return False
        sizes: dict[str, int] = json.loads((folder / SIZES).read_bytes())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _stamps(files: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Raises DataError."""
    try:
        return [_stamp(path) for path in files]
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error


def _stamp(path: Path) -> tuple[str, int, int]:
    found = path.stat()
    return str(path.resolve()), found.st_size, found.st_mtime_ns


@cache  # once a process: a data set in a thousand files is kept a thousand times
def _forget_outdated(root: Path) -> None:
    """Remove what was made of files that have changed or gone: nothing finds it again. What another version of this
    program keeps is left alone."""
    for source in root.glob(f"*/{SOURCE}"):
        try:
            version, _, *stamps = json.loads(source.read_bytes())
        except (OSError, ValueError):
            continue
        if version == FORMAT and any(_is_outdated(*stamp) for stamp in stamps):
            shutil.rmtree(source.parent, ignore_errors=True)


def _is_outdated(path: str, *seen: int) -> bool:
    try:
        return _stamp(Path(path)) != (path, *seen)
    except OSError:
        return True
