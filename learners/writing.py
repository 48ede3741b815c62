"""Writing a checkpoint: under a temporary name, synced, renamed. Complete or not there, whoever is killed when."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import PreTrainedModel

from asyncrl.config.sizes import size_about
from asyncrl.learners import randomness
from asyncrl.learners.checkpoint import (
    FORMAT,
    MANIFEST,
    TRAINING,
    CheckpointError,
    Manifest,
    file_entry,
    sync,
    weights_in,
)
from asyncrl.learners.lora import save_model
from asyncrl.learners.parallel import ALONE
from asyncrl.learners.snapshot import Snapshot, live, state_of
from asyncrl.staleness import Weights


def write(
    checkpoints: Path, snapshot: Snapshot, *, tokenizer: Any, given_up: Callable[[], bool] = lambda: False
) -> Path:
    """Write the checkpoint of a snapshot and return its folder. A writer that is killed, or has no room left, leaves
    the old ones as they were.

    A folder of the same version, left by a branch that was rewound, is replaced; one of a newer lineage is not: its
    learner has taken over. given_up: asked before the new name counts. Raises CheckpointError.
    """
    weights = snapshot.weights
    target = checkpoints / f"version-{weights.version:06d}"
    building = checkpoints / f".{target.name}.{os.getpid()}"
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        for leftover in checkpoints.glob(".version-*"):  # of a killed writer; a run has one learner
            shutil.rmtree(leftover, ignore_errors=True)
        building.mkdir()
        _fill(building, snapshot, tokenizer)
        for path in (*building.rglob("*"), building):
            sync(path)
        there = weights_in(target)
        if given_up() or (there is not None and there.lineage > weights.lineage):
            raise CheckpointError(f"{target} is left as it is: another learner goes on from there")
        if target.exists():
            target.rename(checkpoints / f".{target.name}.old")
        building.rename(target)
        sync(checkpoints)
        shutil.rmtree(checkpoints / f".{target.name}.old", ignore_errors=True)
    except (OSError, CheckpointError) as error:
        shutil.rmtree(building, ignore_errors=True)
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"cannot write checkpoint {target}: {error}") from error
    return target


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
    """Write what `model` is now, which nothing may change meanwhile; by a process that has no other ranks.

    training: `optimizer` and whatever else `training_state` is to give back. Raises CheckpointError.
    """
    snapshot = Snapshot(
        weights=weights,
        model=model,
        state=state_of(model, live),
        optimizer=training["optimizer"],
        rng=randomness.gathered(ALONE, model.device),
        forks=forks,
        trained=trained,
        tokens=tokens,
        start=start,
        more={key: value for key, value in training.items() if key != "optimizer"},
    )
    return write(checkpoints, snapshot, tokenizer=tokenizer)


def _fill(folder: Path, snapshot: Snapshot, tokenizer: Any) -> None:
    """Everything that belongs into the folder. Raises OSError."""
    try:
        save_model(snapshot.model, folder, snapshot.state)
        tokenizer.save_pretrained(folder)
        with (folder / TRAINING).open("wb") as file:
            torch.save({**snapshot.more, "optimizer": snapshot.optimizer, "rng": snapshot.rng}, file)
    except Exception as error:
        if (reason := _of_disk(error)) is None:
            raise
        free = size_about(shutil.disk_usage(folder).free)
        raise OSError(f"{reason} ({free} are free there)") from error
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    manifest = Manifest(
        format=FORMAT,
        lineage=snapshot.weights.lineage,
        version=snapshot.weights.version,
        forks=snapshot.forks,
        trained=snapshot.trained,
        tokens=snapshot.tokens,
        files={name: file_entry(folder / name) for name in names},
        start=snapshot.start,
    )
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))


def _of_disk(error: Exception) -> str | None:
    """What the system said, whatever a library has made of it; None: the error is no disk's."""
    if isinstance(error, OSError):
        return str(error)
    if isinstance(error.__context__, OSError):  # torch.save's own is about positions in the file
        return str(error.__context__)
    return str(error) if "(os error " in str(error) else None  # safetensors, tokenizers
