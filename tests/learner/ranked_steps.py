"""The same steps on any number of ranks: `python ranked_steps.py RANK SIZE FOLDER`, or `outcome` in a process alone.

FOLDER holds model/, groups/*.arrow, and gets `meeting`, and from rank 0 `outcome-SIZE.pt`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from asyncrl.config.recipe import Learner, Lora, Model, Recipe
from asyncrl.learners.optimize import Optimizer
from asyncrl.learners.parallel import Ranks, Sharded
from asyncrl.learners.shares import as_message, balance, combine, group_loads, positions_of, share_of
from asyncrl.learners.step import accumulate, train_step
from asyncrl.learners.trained import load_trained
from asyncrl.schema import decode

RECIPE = Recipe(learner=Learner(learning_rate=1e-2, warmup_steps=0, max_grad_norm=0.5))
ADAPTED = msgspec.structs.replace(RECIPE, model=Model(lora=Lora(r=4, alpha=8)))
STEPS = ((0, 1, 2, 3, 4), (4,), (1, 2, 3))
"""Groups of each step; in the second, all ranks but one have none."""

LIMIT_S = 120.0


def outcome(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """On rank 0: gradients of a first step, then weights, optimizer and account after STEPS; with all weights trained,
    with adapters, and of a step that one rank must skip."""
    return {
        "whole": _train(ranks, folder, RECIPE),
        "adapted": _train(ranks, folder, ADAPTED),
        "skipped": _skip(ranks, folder),
        "resumed": _resume(ranks, folder),
    }


def _train(ranks: Ranks, folder: Path, recipe: Recipe) -> dict[str, Any]:
    model = load_trained(recipe, folder / "model", None)
    whole = ranks.shard(model)
    optimizer = Optimizer(model, recipe.learner, ranks)
    groups = _groups(folder)
    options = {"objective": recipe.objective, "temperature": 1.0, "max_tokens": 25, "ranks": ranks}

    batch, _ = share_of(groups, version=1, recipe=recipe)
    shares = balance(group_loads(batch), ranks.size)
    seen = accumulate(model, *share_of([groups[n] for n in shares[ranks.rank]], version=1, recipe=recipe), **options)
    (tokens,) = ranks.total([seen.tokens])
    gradients = {
        name: ranks.whole(p.grad / tokens).clone() for name, p in model.named_parameters() if p.grad is not None
    }
    for p in model.parameters():
        p.grad = None

    accounts = []
    for chosen in STEPS:
        step = [groups[n] for n in chosen]
        batch, _ = share_of(step, version=1, recipe=recipe)
        shares = balance(group_loads(batch), ranks.size)
        own = share_of([step[n] for n in shares[ranks.rank]], version=1, recipe=recipe)
        result = train_step(model, optimizer, *own, **options)
        positions = [positions_of(batch, share) for share in shares]
        parts = ranks.collect(as_message(result.seen), [len(at) for at in positions])
        if ranks.rank == 0:
            seen = combine(parts, positions, batch, loss_sum=result.seen.loss_sum)
            accounts.append([seen.loss, seen.tokens, result.update.grad_norm, *seen.ratio, *seen.logprobs])
    ranks.gather(model, whole)
    return {
        "gradients": gradients,
        "weights": {name: p.detach().clone() for name, p in whole.named_parameters()},
        "optimizer": optimizer.state_dict(),
        "accounts": accounts,
    }


def _skip(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """The last rank alone has a gradient that is not finite."""
    model = load_trained(RECIPE, folder / "model", None)
    whole = ranks.shard(model)
    optimizer = Optimizer(model, RECIPE.learner, ranks)
    groups = _groups(folder)
    batch, _ = share_of(groups, version=1, recipe=RECIPE)
    share = balance(group_loads(batch), ranks.size)[ranks.rank]
    own, worth = share_of([groups[n] for n in share], version=1, recipe=RECIPE)
    if ranks.rank == ranks.size - 1:
        worth = np.full_like(worth, np.inf)
    options = {"objective": RECIPE.objective, "temperature": 1.0, "max_tokens": 25, "ranks": ranks}
    update = train_step(model, optimizer, own, worth, **options).update
    ranks.gather(model, whole)
    weights = {name: p.detach().clone() for name, p in whole.named_parameters()}
    return {"reason": update.skipped, "weights": weights, "state": optimizer.state_dict()["adam"]["state"]}


def _resume(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """One more step from the optimizer state of one rank, which lies in the folder."""
    model = load_trained(RECIPE, folder / "model", None)
    whole = ranks.shard(model)
    optimizer = Optimizer(model, RECIPE.learner, ranks)
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    groups = _groups(folder)
    batch, _ = share_of(groups, version=1, recipe=RECIPE)
    share = balance(group_loads(batch), ranks.size)[ranks.rank]
    options = {"objective": RECIPE.objective, "temperature": 1.0, "max_tokens": 25, "ranks": ranks}
    train_step(model, optimizer, *share_of([groups[n] for n in share], version=1, recipe=RECIPE), **options)
    ranks.gather(model, whole)
    return {"weights": {name: p.detach().clone() for name, p in whole.named_parameters()}, "updates": optimizer.updates}


def _groups(folder: Path) -> list[Any]:
    return [decode(path.read_bytes()) for path in sorted((folder / "groups").glob("*.arrow"))]


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    ranks = Sharded(rank, size, meeting=folder / f"meeting-{size}", step_s=LIMIT_S, silence_s=LIMIT_S)
    found = outcome(ranks, folder)
    if rank == 0:
        torch.save(found, folder / f"outcome-{size}.pt")
    ranks.close()


if __name__ == "__main__":
    main()
