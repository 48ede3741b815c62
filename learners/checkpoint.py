"""Checkpoints: a folder per version, complete or not there, that transformers loads and a learner resumes from.

    checkpoints/version-000020/
        config.json model.safetensors tokenizer.json ...    what save_pretrained writes, adapters merged
        adapter/                                            the adapter alone, if there is one (`lora.py`)
        training.pt                                         optimizer, RNG; torch.load(weights_only=True)
        checkpoint.json                                     names it, and every file with size and xxh3

Which one is newest is read from the folder, not from a pointer that could disagree with it; damaged ones are passed
over with a warning. How they are written is in `writing.py`, which of them stay in `retention.py`.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash

from asyncrl.learners import randomness
from asyncrl.learners.retention import Kept, kept
from asyncrl.staleness import Lineages, Weights

log = logging.getLogger(__name__)

FORMAT = 2
"""Of what is written. Since 2 `training.pt` has the random numbers of every rank."""

READ = (1, 2)
"""Formats that can be resumed from."""

MANIFEST = "checkpoint.json"
TRAINING = "training.pt"
NAME = re.compile(r"version-(\d{6,})")


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, of another format, or cannot be written; names the folder and what is wrong."""


class FileEntry(msgspec.Struct, frozen=True):
    size: int  # bytes
    xxh3: str  # xxh3_64 hex


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint is. `forks`: lineage -> (parent, version where it forked), the whole path to this lineage.

    `trained`: the batches (lineage, step) consumed since the checkpoint before; `tokens`: trained since the beginning.
    `start`: checksum of the weights that the run started from, where the objective holds the policy near them.
    """

    format: int
    lineage: int
    version: int
    forks: dict[int, tuple[int, int]]
    trained: list[tuple[int, int]]
    tokens: int
    files: dict[str, FileEntry]
    start: str = ""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files were compared with its manifest."""

    folder: Path
    manifest: Manifest

    @property
    def weights(self) -> Weights:
        return Weights(self.manifest.lineage, self.manifest.version)

    def training_state(self) -> dict[str, Any]:
        """`optimizer`, `rng` (of every rank, `randomness.py`), and whatever else its writer kept."""
        state: dict[str, Any] = torch.load(self.folder / TRAINING, map_location="cpu", weights_only=True)
        if self.manifest.format == 1:
            state["rng"] = randomness.of_format_1(state["rng"])
        return state


def load(folder: Path) -> Checkpoint:
    """Read and compare one checkpoint with its manifest. Raises CheckpointError."""
    try:
        raw = (folder / MANIFEST).read_bytes()
        found = msgspec.json.decode(raw)
        if isinstance(found, dict) and (format := found.get("format")) not in READ:
            newer = isinstance(format, int) and format > FORMAT
            raise CheckpointError(
                f"{folder} has format {format}, this program reads {READ[0]} to {READ[-1]}"
                + ("; a newer asyncrl wrote it: resume with that" if newer else "")
            )
        manifest = msgspec.json.decode(raw, type=Manifest)
        for name, entry in manifest.files.items():
            if file_entry(folder / name) != entry:
                raise CheckpointError(f"{folder} is damaged: {name} differs from its checksum in {MANIFEST}")
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{folder} is damaged or unfinished: {error}") from error
    return Checkpoint(folder=folder, manifest=manifest)


def survey(checkpoints: Path) -> tuple[list[Checkpoint], list[str]]:
    """Sound checkpoints, newest first by (lineage, version), and what is wrong with each of the others (logged too)."""
    sound: list[Checkpoint] = []
    damaged: list[str] = []
    for folder in _by_age(checkpoints):
        try:
            sound.append(load(folder))
        except CheckpointError as error:
            log.warning("passing over a checkpoint: %s", error)
            damaged.append(str(error))
    return sound, damaged


def find_resumable(checkpoints: Path) -> Checkpoint | None:
    """The newest sound checkpoint, None if there is none."""
    return next(iter(survey(checkpoints)[0]), None)


def prune(
    checkpoints: Path,
    *,
    lineages: Lineages,
    current: int,
    keep_last: int,
    keep_best: int = 0,
    keep_every: int | None = None,
    success: Callable[[Weights], float | None] = lambda _: None,
) -> Kept:
    """Remove all that `retention.kept` does not name, which it returns, and what has no readable manifest. Called right
    after one was written, which is the newest and sound. success: of a version's evaluation, None if there is none.
    What cannot be removed is logged and stays."""
    folders = {folder: weights_in(folder) for folder in _by_age(checkpoints)}
    saved = [name for name in folders.values() if name is not None]
    keep = kept(
        saved,
        lineages=lineages,
        current=current,
        keep_last=keep_last,
        keep_best=keep_best,
        keep_every=keep_every,
        success={name: success(name) for name in saved} if keep_best else {},
    )
    for folder, name in folders.items():
        if name is not None and name in keep:
            continue
        try:
            shutil.rmtree(folder)
        except OSError as error:
            log.warning("could not remove the old checkpoint %s: %s", folder, error)
    return keep


def _by_age(checkpoints: Path) -> list[Path]:
    """Checkpoint folders, newest first by (lineage, version); those without a readable manifest last."""
    folders = [path for path in checkpoints.glob("version-*") if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=lambda path: (weights_in(path) or Weights(-1, -1), path.name), reverse=True)


def weights_in(folder: Path) -> Weights | None:
    """Which weights a checkpoint's manifest names; None where there is none that can be read. Compares no file."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError):
        return None
    return Weights(manifest.lineage, manifest.version)


def file_entry(path: Path) -> FileEntry:
    """Size and checksum of a file, read a block at a time."""
    digest = xxhash.xxh3_64()
    size = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            size += len(block)
    return FileEntry(size=size, xxh3=digest.hexdigest())


def sync(path: Path) -> None:
    """Make a file's content, or a folder's names, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
