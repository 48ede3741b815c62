"""A checkpoint that any number of ranks goes on from: `python resharding.py RANK SIZE FOLDER SOURCE`, or `go_on` alone.

FOLDER holds model/ and groups/*.arrow. SOURCE has a checkpoint in whole/ and one in adapted/. What each was loaded as
goes to FOLDER/again-SIZE/, and what it is after another step to FOLDER/after-SIZE/.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

from asyncrl.config.recipe import Learner, Lora, Model, Objective, Recipe
from asyncrl.learners.checkpoint import Checkpoint, find_resumable
from asyncrl.learners.model import load_tokenizer
from asyncrl.learners.parallel import Ranks, Sharded, in_folder
from asyncrl.learners.shares import as_message, share_groups
from asyncrl.learners.snapshot import Copies, Snapshot, state_of
from asyncrl.learners.trainer import Trainer
from asyncrl.learners.writing import write
from asyncrl.schema import decode
from asyncrl.staleness import Weights

RECIPE = Recipe(
    objective=Objective(preset="grpo"), learner=Learner(learning_rate=1e-2, warmup_steps=3, updates_per_step=2)
)
RECIPES = {"whole": RECIPE, "adapted": msgspec.structs.replace(RECIPE, model=Model(lora=Lora(r=4, alpha=8)))}
LIMIT_S = 240.0


def go_on(ranks: Ranks, folder: Path, source: Path | None) -> None:
    """From what lies in `source`, None: the initial weights."""
    groups = [decode(path.read_bytes()) for path in sorted((folder / "groups").glob("*.arrow"))]
    for name, recipe in RECIPES.items():
        checkpoint = None if source is None else find_resumable(source / name)
        trainer = Trainer.load(recipe, folder / "model", checkpoint, ranks)
        version = 0 if checkpoint is None else checkpoint.weights.version
        if checkpoint is not None:
            save(trainer, ranks, folder / f"again-{ranks.size}" / name, version, checkpoint)
        step = trainer.prepare(groups, version=1)
        if ranks.rank == 0:
            trainer.train(step)
        else:
            own = [step.groups[n] for n in share_groups(step.shares, ranks.rank)]
            ranks.collect(as_message(trainer.train_share(own, shares=step.shares, version=1).seen), [])
        torch.manual_seed(100 * version + ranks.rank)
        save(trainer, ranks, folder / f"after-{ranks.size}" / name, version + 1, checkpoint)


def save(trainer: Trainer, ranks: Ranks, folder: Path, version: int, before: Checkpoint | None) -> None:
    """As the learner does, from every rank."""
    copies = Copies()
    ranks.gather(trainer.model, trainer.whole)
    optimizer, rng = trainer.resumable(copies.keep)
    if ranks.rank:
        return
    snapshot = Snapshot(
        weights=Weights(1, version),
        model=trainer.whole,
        state=state_of(trainer.whole, copies.keep),
        optimizer=optimizer,
        rng=rng,
        forks={1: (0, 0)},
        trained=[],
        tokens=0,
    )
    source: Any = trainer.whole.name_or_path if before is None else before.folder
    write(folder, snapshot, tokenizer=load_tokenizer(source))


def main() -> None:
    rank, size, folder, source = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    meeting = in_folder(folder / f"resharding-{size}", rank, size)
    ranks = Sharded(rank, size, meeting=meeting, step_s=LIMIT_S, silence_s=LIMIT_S)
    go_on(ranks, folder, source)
    ranks.close()


if __name__ == "__main__":
    main()
