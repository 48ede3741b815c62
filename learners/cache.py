"""Where built-in models are kept once they are made: one sealed folder each, made by one process at a time."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash
from filelock import FileLock, Timeout

from asyncrl.config.cache_folder import cache_root

logger = logging.getLogger(__name__)

LOCK_LIMIT_S = 600.0  # another process builds for 10-60 s of CPU; more than this means that it hangs
CHECKSUMS = "checksums.json"

TINY_FORMAT = 2
"""Of `builtin:tiny`'s folder and of what fills it: raise it when either changes, so that old ones are left alone."""


class BuiltinModelError(RuntimeError):
    """A built-in model could not be made or kept; the message says what to do."""


def ensure(name: str, build: Callable[[Path], object]) -> Path:
    """The folder `name` in the cache, made by `build` (given an empty folder) if it is missing or damaged.

    Of several processes that call at once one builds and the others wait. Raises BuiltinModelError: the cache cannot
    be written, another process hangs; and what `build` raises.
    """
    root = cache_root()
    folder = root / name
    if not damage(folder):
        return folder  # without the lock: an intact cache may lie on a read-only disk
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{name}.lock"):
            fault = damage(folder)
            if not fault:
                return folder  # another process built it meanwhile
            if folder.exists():
                logger.warning("the cached built-in model %s is damaged (%s); making it again", folder, fault)
            # A fixed name, cleared first: only the holder of the lock builds, and what a killed one left goes away.
            building = root / f".{name}.building"
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
            build(building)
            seal(building)
            shutil.rmtree(folder, ignore_errors=True)
            building.rename(folder)
    except OSError as error:
        if error.errno is None:  # not the system's: transformers says so what it makes of a file
            raise
        raise BuiltinModelError(
            f"the built-in model cannot be kept in {root} ({error}): set ASYNCRL_CACHE to a folder that can be written"
        ) from error
    return folder


def tiny_name(seed: int, digits: tuple[int, int]) -> str:
    """The cached folder of `builtin:tiny`, warm-started with `seed` on strings of `digits[0]` to `digits[1]` digits."""
    return f"tiny-{TINY_FORMAT}-seed{seed}-{digits[0]}-{digits[1]}"


def damage(folder: Path) -> str:
    """What is wrong with a cached folder, "" if every file is there with its checksum."""
    try:
        expected = json.loads((folder / CHECKSUMS).read_bytes())
        for name, checksum in expected.items():
            if _checksum(folder / name) != checksum:
                return f"{name} does not have its checksum"
    except (OSError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def seal(folder: Path) -> None:
    """Write down the checksum of every file: from now on the folder is complete."""
    checksums = {path.name: _checksum(path) for path in sorted(folder.iterdir())}
    (folder / CHECKSUMS).write_text(json.dumps(checksums, indent=1))


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of one cached folder. The system frees it when its holder dies."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.info("another process makes the built-in model (%s); waiting for it", path)
        try:
            lock.acquire(timeout=LOCK_LIMIT_S)
        except Timeout as error:
            raise BuiltinModelError(
                f"another process has held {path} for more than {LOCK_LIMIT_S:.0f} s: end it, or set ASYNCRL_CACHE to "
                "another folder"
            ) from error
    try:
        yield
    finally:
        lock.release()
