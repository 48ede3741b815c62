"""The same steps on any number of ranks: `python ranked_steps.py RANK SIZE FOLDER`, `torchrun ranked_steps.py FOLDER`,
or `outcome` in a process alone.

FOLDER holds model/, groups/*.arrow, segmented/*.arrow, and gets `meeting`, and from rank 0 `outcome-SIZE.pt`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import torch

from asyncrl.config.objective import Preset
from asyncrl.config.recipe import Buffer, Learner, Lora, Model, Objective, Recipe
from asyncrl.learners.batch import Batch
from asyncrl.learners.diagnostics import step_metrics
from asyncrl.learners.lora import served_weights
from asyncrl.learners.optimize import Optimizer
from asyncrl.learners.parallel import Ranks, Sharded, in_folder
from asyncrl.learners.parameters import Parameters
from asyncrl.learners.shares import (
    as_message,
    balance,
    combine,
    deal,
    positions_of,
    share_groups,
    share_of,
    share_parts,
)
from asyncrl.learners.step import accumulate, train_step
from asyncrl.learners.trained import load_trained
from asyncrl.learners.trainer import Trainer
from asyncrl.runtime.launch import Launch
from asyncrl.runtime.launched import Peers, connected
from asyncrl.schema import decode

RECIPE = Recipe(
    objective=Objective(preset="grpo"), learner=Learner(learning_rate=1e-2, warmup_steps=0, max_grad_norm=0.5)
)
ADAPTED = msgspec.structs.replace(RECIPE, model=Model(lora=Lora(r=4, alpha=8)))
ASKING = Recipe(
    learner=Learner(learning_rate=2e-3, warmup_steps=0, max_tokens_per_microbatch=25),
    objective=Objective(preset="grpo", proximal="behaviour-version", beta=0.3, entropy=0.01),
    buffer=Buffer(max_trajectory_age=3),
)
STEPS = ((0, 1, 2, 3, 4), (4,), (1, 2, 3))
"""Groups of each step; in the second, all ranks but one have none."""

ASKED_STEPS = ((0, 2), (0, 1, 2, 3, 4), (4,), (1, 2, 3))
"""The groups with odd numbers are of version 1, the others of version 0."""

LIMIT_S = 240.0


OBJECTIVE = {"objective": RECIPE.objective, "temperature": 1.0, "max_tokens": 25}
"""Splits what a rank has into several micro-batches, and not the same number on each."""


def outcome(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """On rank 0: steps with all weights trained and with adapters, of two updates, by the versions that sampled, one
    that one rank must skip, one after a resume."""
    return {
        "whole": train(ranks, folder, RECIPE),
        "adapted": train(ranks, folder, ADAPTED),
        "several": several(ranks, folder),
        "paced": paced(ranks, folder),
        "asking": ask(ranks, folder),
        "presets": presets(ranks, folder),
        "segmented": segmented(ranks, folder),
        "skipped": skip(ranks, folder),
        "resumed": resume(ranks, folder),
    }


def train(ranks: Ranks, folder: Path, recipe: Recipe) -> dict[str, Any]:
    """The gradients of a first batch; then weights, as trained and as served, optimizer and account after STEPS."""
    model, whole, optimizer = _learner(ranks, folder, recipe)
    groups = groups_of(folder)
    _, own = _share(ranks, groups)
    (tokens,) = ranks.total([accumulate(model, *own, **OBJECTIVE, ranks=ranks).tokens])
    gradients = {
        name: ranks.whole(p.grad / tokens).clone() for name, p in model.named_parameters() if p.grad is not None
    }
    for p in model.parameters():
        p.grad = None

    accounts = []
    for chosen in STEPS:
        step = [groups[n] for n in chosen]
        shares, own = _share(ranks, step)
        result = train_step(model, optimizer, *own, **OBJECTIVE, ranks=ranks)
        batch, _ = share_of(step, version=1, recipe=recipe)
        positions = [positions_of(batch, share) for share in shares]
        parts = ranks.collect(as_message(result.seen), [len(at) for at in positions])
        if ranks.rank == 0:
            seen = combine(parts, positions, batch, loss_sum=result.seen.loss_sum, units=result.seen.units)
            told = [seen.loss, seen.tokens, result.updates.grad_norm, result.updates.ess]
            accounts.append([*told, *seen.ratio, *seen.logprobs, *seen.pulls, *seen.measured])
    return {
        "gradients": gradients,
        "weights": _weights(ranks, model, whole),
        "served": {name: tensor.clone() for name, tensor in served_weights(whole)} if ranks.rank == 0 else {},
        "optimizer": optimizer.state_dict(),
        "accounts": accounts,
    }


def several(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """STEPS again, of two updates each: 3 and 2 groups, 1, 2 and 1. An update of one group leaves all ranks but one
    without any."""
    model, whole, optimizer = _learner(ranks, folder, RECIPE)
    groups = groups_of(folder)
    norms = []
    for chosen in STEPS:
        step = [groups[n] for n in chosen]
        batch, _ = share_of(step, version=1, recipe=RECIPE)
        shares = deal(chosen, loads(batch), updates=2, ranks=ranks.size)
        own = share_of([step[n] for n in share_groups(shares, ranks.rank)], version=1, recipe=RECIPE)
        parts = share_parts(shares, ranks.rank)
        result = train_step(model, optimizer, *own, **OBJECTIVE, parts=parts, ranks=ranks)
        norms += [update.grad_norm for update in result.updates.each]
    return {"weights": _weights(ranks, model, whole), "norms": norms, "counts": (optimizer.updates, optimizer.steps)}


def paced(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """The same at rates that follow all ranks' answers. averages: as each rank has them."""
    model, whole, _ = _learner(ranks, folder, RECIPE)
    optimizer = Optimizer(model, msgspec.structs.replace(RECIPE.learner, rate_by_ess=True), ranks)
    groups = groups_of(folder)
    rates, shares_of_answers = [], []
    for chosen in STEPS:
        step = [groups[n] for n in chosen]
        batch, _ = share_of(step, version=1, recipe=RECIPE)
        shares = deal(chosen, loads(batch), updates=2, ranks=ranks.size)
        own = share_of([step[n] for n in share_groups(shares, ranks.rank)], version=1, recipe=RECIPE)
        parts = share_parts(shares, ranks.rank)
        updates = train_step(model, optimizer, *own, **OBJECTIVE, parts=parts, ranks=ranks).updates
        rates += [update.learning_rate for update in updates.each]
        shares_of_answers.append(updates.ess)
    mine = [optimizer.pace.average if rank == ranks.rank else 0.0 for rank in range(ranks.size)]
    return {
        "weights": _weights(ranks, model, whole),
        "rates": rates,
        "ess": shares_of_answers,
        "averages": ranks.total(mine),
    }


def ask(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """ASKED_STEPS, each of which asks the versions that sampled, from the third on none of them its own, and the
    reference."""
    trainer = Trainer.load(ASKING, folder / "model", None, ranks)
    parameters = Parameters(trainer.model, ranks)
    again = parameters.parts_of(load_trained(ASKING.model, folder / "model", None, seed=0))  # as a resumed learner does
    assert all(torch.equal(part, own) for part, own in zip(again, parameters.copies(), strict=True))
    groups = groups_of(folder)
    accounts = []
    for version, chosen in enumerate(ASKED_STEPS):
        step = trainer.prepare([groups[n] for n in chosen], version=version)
        if ranks.rank == 0:
            seen, _ = trainer.train(step)
            assert not np.isnan(seen.proximal[seen.included]).any()
            assert not np.isnan(seen.reference[seen.included]).any()
            per_token = (seen.proximal, seen.reference, seen.entropy)
            accounts.append([*seen.ratio, *(value for column in per_token for value in column[seen.included])])
        else:
            own = [step.groups[n] for n in share_groups(step.shares, ranks.rank)]
            ranks.collect(as_message(trainer.train_share(own, shares=step.shares, version=version).seen), [])
    assert trainer.history is not None
    held = (trainer.history.versions, trainer.history.nbytes)
    return {"weights": _weights(ranks, trainer.model, trainer.whole), "accounts": accounts, "held": held}


def presets(ranks: Ranks, folder: Path) -> dict[str, dict[str, Any]]:
    """By preset: all metrics that follow from data and weights of a step by all groups; passes without tokens; the
    weights after it."""
    groups = groups_of(folder) + groups_of(folder, "segmented")
    learner = msgspec.structs.replace(RECIPE.learner, max_tokens_per_microbatch=16)
    found = {}
    for preset in get_args(Preset):
        recipe = msgspec.structs.replace(RECIPE, objective=Objective(preset=preset), learner=learner)
        trainer = Trainer.load(recipe, folder / "model", None, ranks)
        step = trainer.prepare(groups, version=1)
        told: dict[str, Any] = {}
        if ranks.rank == 0:
            seen, updates = trainer.train(step)
            record = step_metrics(step.packed, step.batch, step.worth, seen, first=step.first, update="recompute")
            record |= {"grad_norm": updates.grad_norm, "ess": updates.ess, "updates": len(updates.applied)}
            told = {"record": record, "idle": seen.idle_passes}
        else:
            own = [step.groups[n] for n in share_groups(step.shares, ranks.rank)]
            ranks.collect(as_message(trainer.train_share(own, shares=step.shares, version=1).seen), [])
        found[preset] = {**told, "weights": _weights(ranks, trainer.model, trainer.whole)}
    return found


def segmented(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """A step by whole answers, of which one group's alone are several segments, each in a micro-batch of its own, and
    alone have sampling masks."""
    recipe = msgspec.structs.replace(RECIPE, objective=Objective(preset="gspo", epsilon=0.1, epsilon_high=0.1))
    model, whole, optimizer = _learner(ranks, folder, recipe)
    _, own = _share(ranks, groups_of(folder, "segmented"))
    options = {"objective": recipe.objective, "temperature": 1.0, "max_tokens": 8}
    result = train_step(model, optimizer, *own, **options, ranks=ranks)
    return {"weights": _weights(ranks, model, whole), "norm": result.updates.grad_norm, "units": result.seen.units}


def skip(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """The last rank alone has a gradient that is not finite."""
    model, whole, optimizer = _learner(ranks, folder, RECIPE)
    _, (batch, worth) = _share(ranks, groups_of(folder))
    if ranks.rank == ranks.size - 1:
        worth = np.full_like(worth, np.inf)
    updates = train_step(model, optimizer, batch, worth, **OBJECTIVE, ranks=ranks).updates
    weights = _weights(ranks, model, whole)
    return {"reason": updates.skipped, "weights": weights, "state": optimizer.state_dict()["adam"]["state"]}


def resume(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """One more step, with the optimizer's state that one rank has left in `folder`."""
    model, whole, optimizer = _learner(ranks, folder, RECIPE)
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    _, own = _share(ranks, groups_of(folder))
    train_step(model, optimizer, *own, **OBJECTIVE, ranks=ranks)
    return {"weights": _weights(ranks, model, whole), "updates": optimizer.updates}


def loads(batch: Batch) -> list[int]:
    """Tokens of each group."""
    return [int(n) for n in np.bincount(batch.groups, weights=batch.lengths)]


def groups_of(folder: Path, name: str = "groups") -> list[Any]:
    return [decode(path.read_bytes()) for path in sorted((folder / name).glob("*.arrow"))]


def _learner(ranks: Ranks, folder: Path, recipe: Recipe) -> tuple[Any, Any, Optimizer]:
    model = load_trained(recipe.model, folder / "model", None, seed=recipe.run.seed)
    whole = ranks.shard(model)
    return model, whole, Optimizer(model, recipe.learner, ranks)


def _share(ranks: Ranks, groups: list[Any]) -> tuple[list[list[int]], tuple[Any, Any]]:
    """All shares, and what of `groups` this rank trains."""
    batch, _ = share_of(groups, version=1, recipe=RECIPE)
    shares = balance(loads(batch), ranks.size)
    return shares, share_of([groups[n] for n in shares[ranks.rank]], version=1, recipe=RECIPE)


def _weights(ranks: Ranks, model: Any, whole: Any) -> dict[str, torch.Tensor]:
    ranks.gather(model, whole)
    return {name: p.detach().clone() for name, p in whole.named_parameters()}


def main() -> None:
    folder = Path(sys.argv[-1])
    torch.set_num_threads(1)
    launch = Launch.of(os.environ)
    if launch is not None:
        rank, size = launch.rank, launch.size
        peers = Peers(connected(launch), launch, limit_s=LIMIT_S)
        meeting = asyncio.run(peers.meet(asyncio.Event(), interface=None))
        assert meeting is not None
    else:
        rank, size = int(sys.argv[1]), int(sys.argv[2])
        meeting = in_folder(folder / f"meeting-{size}", rank, size)
    ranks = Sharded(rank, size, meeting=meeting, step_s=LIMIT_S, silence_s=LIMIT_S)
    found = outcome(ranks, folder)
    if rank == 0:
        torch.save(found, folder / f"outcome-{size}.pt")
    ranks.close()
    if launch is not None:
        peers.close()


if __name__ == "__main__":
    main()
