"""What a finished run left that another one can be compared with: its archive's steps and its last checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from asyncrl.benchmarks.runs import RunError
from asyncrl.buffers.archive import Archive
from asyncrl.learners.checkpoint import find_resumable
from asyncrl.schema import pack
from asyncrl.staleness import Weights


@dataclass(frozen=True, slots=True)
class Trained:
    """One step. tickets: in the order of its batch. digest: of tokens, what of them was trained, log-probs, rewards."""

    tickets: tuple[int, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Left:
    """steps: of the surviving branch. weights, optimizer, random: digests of what the last checkpoint has."""

    steps: tuple[Trained, ...]
    weights: str
    optimizer: str
    random: str


def left_by(folder: Path, *, steps: int) -> Left:
    """What is in a run folder. Raises RunError: there are not `steps` steps, or no checkpoint of the last of them."""
    archive = Archive(folder / "archive")
    branch = [Weights(lineage, step) for lineage, first, last in archive.branch() for step in range(first, last + 1)]
    if [name.version for name in branch] != list(range(steps)):
        raise RunError(f"{folder}/archive holds the steps {branch}, not {steps}")
    checkpoint = find_resumable(folder / "checkpoints")
    if checkpoint is None or checkpoint.weights.version != steps:
        raise RunError(f"{folder}/checkpoints has none of version {steps}")
    state = checkpoint.training_state()
    return Left(
        steps=tuple(_trained(archive, name) for name in branch),
        weights=checkpoint.manifest.files["model.safetensors"].xxh3,
        optimizer=digest_of(state["optimizer"]),
        random=digest_of(state["rng"]),
    )


def _trained(archive: Archive, step: Weights) -> Trained:
    packed = pack(archive.groups(step))
    columns = (packed.token_ids, packed.loss_mask, packed.logprobs, packed.rewards, packed.cu_seqlens)
    digest = xxhash.xxh3_64()
    for column in columns:
        digest.update(column.tobytes())
    return Trained(tuple(ordinal for ordinal, _ in archive.tickets(step)), digest.hexdigest())


def digest_of(state: Any) -> str:
    """Of tensors, numbers and text in mappings and sequences: the same if and only if all of them are, bit for bit."""
    digest = xxhash.xxh3_64()
    _add(state, digest)
    return digest.hexdigest()


def _add(value: Any, digest: xxhash.xxh3_64) -> None:
    import torch

    if isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            digest.update(f"{key!r}:".encode())
            _add(value[key], digest)
    elif isinstance(value, list | tuple):
        digest.update(f"[{len(value)}]".encode())
        for item in value:
            _add(item, digest)
    elif isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    else:
        digest.update(f"{value!r};".encode())


def difference(one: Left, other: Left, *, bits: bool) -> str:
    """The first thing in which they differ, "" if they do not. bits: all is compared, not only which prompts each step
    trained. In a batch, those that are due come first, and what was made again is due later: its order may be another.

    >>> one = Left((Trained((0, 1), "a"), Trained((2, 3), "b")), "w", "o", "r")
    >>> other = Left((Trained((0, 1), "a"), Trained((2, 3), "c")), "v", "p", "r")
    >>> difference(one, other, bits=True), difference(one, other, bits=False)
    ('tokens, log-probs or rewards of step 2', '')
    """
    pairs: Sequence[tuple[Trained, Trained]] = list(zip(one.steps, other.steps, strict=True))
    for number, (mine, others) in enumerate(pairs, 1):
        if mine.tickets != others.tickets and (bits or sorted(mine.tickets) != sorted(others.tickets)):
            return f"prompts of step {number}"
        if bits and mine.digest != others.digest:
            return f"tokens, log-probs or rewards of step {number}"
    if not bits:
        return ""
    parts = (
        ("weights", one.weights, other.weights),
        ("the optimizer", one.optimizer, other.optimizer),
        ("random numbers", one.random, other.random),
    )
    return next((name for name, mine, others in parts if mine != others), "")
