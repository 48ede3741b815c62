"""Checkpoints: a folder per version, complete or not there, that transformers loads and a learner resumes from.

    checkpoints/version-000020/
        config.json model.safetensors tokenizer.json ...    what save_pretrained writes, adapters merged
        adapter/                                            the adapter alone, if there is one (`lora.py`)
        training.pt                                         optimizer, RNG; torch.load(weights_only=True)
        checkpoint.json                                     names it, and every file with size and xxh3

Written under a temporary name, synced, renamed. Which one is newest is read from the folder, not from a pointer that
could disagree with it; damaged ones are passed over with a warning.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from transformers import PreTrainedModel

from asyncrl.learners.lora import save_model
from asyncrl.staleness import Lineages, Weights

log = logging.getLogger(__name__)

FORMAT = 1
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
        """What `save` was given as `training`, plus `rng`."""
        state: dict[str, Any] = torch.load(self.folder / TRAINING, map_location="cpu", weights_only=True)
        return state


def save(
    checkpoints: Path,
    *,
    model: PreTrainedModel,
    tokenizer: Any,
    training: dict[str, Any],
    weights: Weights,
    forks: dict[int, tuple[int, int]],
    trained: list[tuple[int, int]],
    tokens: int,
    start: str = "",
) -> Path:
    """Write the checkpoint of `weights` and return its folder. A killed writer leaves the old ones as they were.

    A folder of the same version, left by a branch that was rewound, is replaced. Raises CheckpointError.
    """
    target = checkpoints / f"version-{weights.version:06d}"
    building = checkpoints / f".{target.name}.{os.getpid()}"
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        for leftover in checkpoints.glob(".version-*"):  # of a killed writer; a run has one learner
            shutil.rmtree(leftover, ignore_errors=True)
        building.mkdir()
        save_model(model, building)
        tokenizer.save_pretrained(building)
        torch.save({**training, "rng": _rng_state()}, building / TRAINING)
        names = sorted(str(path.relative_to(building)) for path in building.rglob("*") if path.is_file())
        manifest = Manifest(
            format=FORMAT,
            lineage=weights.lineage,
            version=weights.version,
            forks=forks,
            trained=trained,
            tokens=tokens,
            files={name: file_entry(building / name) for name in names},
            start=start,
        )
        (building / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
        for path in (*building.rglob("*"), building):
            sync(path)
        if target.exists():
            target.rename(checkpoints / f".{target.name}.old")
        building.rename(target)
        sync(checkpoints)
        shutil.rmtree(checkpoints / f".{target.name}.old", ignore_errors=True)
    except OSError as error:
        shutil.rmtree(building, ignore_errors=True)
        raise CheckpointError(f"cannot write checkpoint {target}: {error}") from error
    return target


def load(folder: Path) -> Checkpoint:
    """Read and compare one checkpoint with its manifest. Raises CheckpointError."""
    try:
        raw = (folder / MANIFEST).read_bytes()
        found = msgspec.json.decode(raw)
        if isinstance(found, dict) and found.get("format") != FORMAT:
            raise CheckpointError(f"{folder} has format {found.get('format')}, this program reads {FORMAT}")
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


def prune(checkpoints: Path, *, keep_last: int, lineages: Lineages, current: int) -> list[Weights]:
    """Remove all but the newest `keep_last` of the current branch, which it returns, newest first; and those of rewound
    branches: nothing resumes from them, and by their number alone they would push living ones out. What cannot be
    removed is logged and stays."""
    kept: list[Weights] = []
    for folder in _by_age(checkpoints):
        name = _weights(folder)
        if name is not None and lineages.is_ancestor(name, current) and len(kept) < keep_last:
            kept.append(name)
            continue
        try:
            shutil.rmtree(folder)
        except OSError as error:
            log.warning("could not remove the old checkpoint %s: %s", folder, error)
    return kept


def restore_rng(state: dict[str, Any]) -> None:
    """Continue torch's random numbers where a checkpoint's `training_state()["rng"]` left them."""
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


def _rng_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def _by_age(checkpoints: Path) -> list[Path]:
    """Checkpoint folders, newest first by (lineage, version); those without a readable manifest last."""
    folders = [path for path in checkpoints.glob("version-*") if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=lambda path: (_weights(path) or Weights(-1, -1), path.name), reverse=True)


def _weights(folder: Path) -> Weights | None:
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
