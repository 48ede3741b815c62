"""A recorded run trained again from its archive, by the code that trained it, and compared with what it left.

A step is a function of weights, optimizer state, recipe and groups (`trainer.py`). What was changed in the archive
afterwards, be it one bit of one token, therefore shows at the first version that left a trace from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from asyncrl.config.recipe import Model, Recipe
from asyncrl.learners.checkpoint import Checkpoint
from asyncrl.learners.lora import in_dtype, served_weights
from asyncrl.learners.model import load_model
from asyncrl.learners.recording import Recording, ReplayError
from asyncrl.learners.shrinking import Budget
from asyncrl.learners.trainer import Trainer
from asyncrl.learners.writing import save
from asyncrl.staleness import Weights
from asyncrl.weights.manifest import combined_checksum


@dataclass(frozen=True, slots=True)
class Compared:
    """One version, replayed, beside what the run left of it. checksum: xxh3 of the replayed weights, float32.

    stamps, checkpoint: whether the bits are the same; None where the run left none. apart: the largest difference of
    any number from the checkpoint's.
    """

    version: int
    checksum: str
    stamps: bool | None = None
    checkpoint: bool | None = None
    apart: float | None = None

    @property
    def equal(self) -> bool | None:
        """None: the run left nothing of this version."""
        found = [same for same in (self.stamps, self.checkpoint) if same is not None]
        return all(found) if found else None


@dataclass(frozen=True, slots=True)
class Replayed:
    """Where a replay ended. tokens: trained since the beginning of the run."""

    recording: Recording
    trainer: Trainer
    weights: Weights
    tokens: int

    def save(self, folder: Path, *, tokenizer: Any) -> Path:
        """Write the last version as a checkpoint in `folder`, which transformers loads. Raises CheckpointError."""
        return save(
            folder,
            model=self.trainer.whole,
            tokenizer=tokenizer,
            training={"optimizer": self.trainer.optimizer.state_dict()},
            weights=self.weights,
            forks=dict(self.recording.forks),
            trained=[(step.lineage, step.version) for step in self.recording.steps(0)],
            tokens=self.tokens,
            start=self.trainer.start,
        )


def replay(
    recording: Recording,
    recipe: Recipe,
    model_path: Path,
    *,
    start: int,
    on_version: Callable[[Compared], None],
) -> Replayed:
    """Train every step from version `start` on again, on one rank.

    start: 0 for the initial weights in `model_path`, else the version of a checkpoint that was kept. `on_version` hears
    how each version compares, `start` included. Raises ReplayError, ModelError.
    """
    begin = recording.start(start)
    _check_history(recording, recipe, start)
    steps, stamps = recording.steps(start), recording.stamps(start)
    trainer = Trainer.load(recipe, model_path, begin)
    tokens = begin.manifest.tokens if begin else 0

    def look(version: int) -> Compared:
        compared = compare(
            trainer.whole, version, recipe.model, stamps=stamps.get(version), kept=recording.kept.get(version)
        )
        on_version(compared)
        return compared

    if look(start).equal is False and begin is None:
        raise ReplayError(
            f"model.path {recipe.model.path} gives other weights than those the run began with: nothing that follows "
            "can be the same.\nGive those (--set model.path=...), or start from a checkpoint (--from VERSION)"
        )
    lineage = steps[0].lineage
    for step in steps:
        if step.lineage != lineage:
            trainer.restart(step.version)
            lineage = step.lineage
        if (budget := recording.budgets.get(step)) is not None:
            trainer.budget = Budget.of(budget)
        try:
            groups = recording.archive.groups(step)
        except ValueError as error:
            raise ReplayError(str(error)) from None
        seen, _ = trainer.train(trainer.prepare(groups, version=step.version))
        tokens += seen.tokens
        look(step.version + 1)
    return Replayed(recording, trainer, Weights(steps[-1].lineage, steps[-1].version + 1), tokens)


def _check_history(recording: Recording, recipe: Recipe, start: int) -> None:
    """Where a learner began it knew no earlier versions; anywhere else, those that it asked are not in a checkpoint."""
    begun = [first for _, first, _ in recording.branch]
    if recipe.objective.proximal == "behaviour-version" and start not in begun:
        raise ReplayError(
            f"with objective.proximal: behaviour-version the step from version {start} asked versions before it, which "
            f"its checkpoint has not.\nStart where a learner did (--from VERSION): {', '.join(map(str, begun))}"
        )


def compare(
    model: PreTrainedModel, version: int, config: Model, *, stamps: Set[str] | None, kept: Checkpoint | None
) -> Compared:
    """`model` beside what rows were stamped with, which is the checksum of the weights as `config` has them served, and
    beside the checkpoint of that version."""
    checksum = combined_checksum(served_weights(model))
    served = checksum
    if config.dtype != "float32":
        served = combined_checksum(in_dtype(served_weights(model), config.dtype))
    same = None if stamps is None else stamps == {served}
    if kept is None:
        return Compared(version, checksum, stamps=same)
    saved = load_model(
        kept.folder, config.dtype, config.attn_implementation, trust_remote_code=config.trust_remote_code
    )
    apart = 0.0
    for (_, replayed), (_, other) in zip(served_weights(model), served_weights(saved), strict=True):
        if other.numel():
            apart = max(apart, float((replayed.cpu().double() - other.cpu().double()).abs().max()))
    equal = combined_checksum(served_weights(saved)) == checksum
    return Compared(version, checksum, stamps=same, checkpoint=equal, apart=apart)
