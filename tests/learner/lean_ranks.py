"""Steps that spare memory, on any number of ranks: `python lean_ranks.py RANK SIZE FOLDER`, or `outcomes` alone.

FOLDER holds model/ and groups/*.arrow, and gets from rank 0 `outcomes-SIZE.pt`. At the end memory runs out on the last
rank, which nobody survives.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch

from asyncrl.config.recipe import Learner, Lora, Model, Objective, Recipe
from asyncrl.learners.parallel import Ranks, Sharded, in_folder
from asyncrl.learners.shares import as_message, share_groups
from asyncrl.learners.trainer import Trainer
from asyncrl.schema import decode

LIMIT_S = 120.0
RECIPE = Recipe(
    learner=Learner(learning_rate=1e-2, warmup_steps=0, max_tokens_per_microbatch=25),
    objective=Objective(preset="grpo"),
)
ADAPTED = msgspec.structs.replace(RECIPE, model=Model(lora=Lora(r=2, alpha=4)))


def lean(recipe: Recipe, **keys: bool) -> Recipe:
    return msgspec.structs.replace(recipe, learner=msgspec.structs.replace(recipe.learner, **keys))


RECIPES = {
    "plain": RECIPE,
    "adapted": ADAPTED,
    "recomputed": lean(RECIPE, gradient_checkpointing=True),
    "offloaded": lean(RECIPE, cpu_offload=True),
    "both": lean(RECIPE, gradient_checkpointing=True, cpu_offload=True),
    "both, adapted": lean(ADAPTED, gradient_checkpointing=True, cpu_offload=True),
}


def outcomes(ranks: Ranks, folder: Path, names: Iterable[str] = RECIPES) -> dict[str, dict[str, torch.Tensor]]:
    """Weights after two steps by each of these recipes."""
    found = {}
    for name in names:
        trainer = Trainer.load(RECIPES[name], folder / "model", None, ranks)
        if isinstance(ranks, Sharded):
            check_offloaded(trainer)
        for version in range(2):
            train(trainer, folder, version)
        ranks.gather(trainer.model, trainer.whole)
        found[name] = {name: p.detach().clone() for name, p in trainer.whole.named_parameters()}
    return found


def train(trainer: Trainer, folder: Path, version: int) -> None:
    groups = [decode(path.read_bytes()) for path in sorted((folder / "groups").glob("*.arrow"))]
    step = trainer.prepare(groups, version=version)
    if trainer.ranks.rank == 0:
        trainer.train(step)
    else:
        own = [groups[n] for n in share_groups(step.shares, trainer.ranks.rank)]
        result = trainer.train_share(own, shares=step.shares, version=version)
        trainer.ranks.collect(as_message(result.seen), [])


def check_offloaded(trainer: Trainer) -> None:
    """FSDP2 was told to, for every module that it shards, and the parts are in host memory."""
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

    policies = [
        type(module._get_fsdp_state()._fsdp_param_group.offload_policy)
        for module in trainer.model.modules()
        if isinstance(module, FSDPModule)
    ]
    assert policies == [CPUOffloadPolicy] * 3, policies  # of two layers and the rest
    assert all(trainer.ranks.own(p).device.type == "cpu" for p in trainer.model.parameters())


def run_out(trainer: Trainer, at: int) -> None:
    """Memory is short on this rank, in the layers of a pass."""
    passes: Any = iter(range(10**6))

    def fail(*_: Any) -> None:
        if next(passes) == at:
            raise torch.OutOfMemoryError("CUDA out of memory")

    trainer.model.model.layers[1].register_forward_pre_hook(fail)


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    meeting = in_folder(folder / f"meeting-{size}", rank, size)
    ranks = Sharded(rank, size, meeting=meeting, step_s=LIMIT_S, silence_s=LIMIT_S)
    found = outcomes(ranks, folder, ["both", "both, adapted"])
    trainer = Trainer.load(RECIPES["offloaded"], folder / "model", None, ranks, run_dir=folder / f"run-{size}")
    if rank == size - 1:
        run_out(trainer, at=1)
    if rank == 0:
        torch.save(found, folder / f"outcomes-{size}.pt")
    train(trainer, folder, 0)


if __name__ == "__main__":
    main()
