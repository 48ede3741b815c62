"""Steps in which a rank has nothing to train, on any number of ranks: `python broken_ranks.py RANK SIZE FOLDER`, or
`outcome` in a process alone.

FOLDER holds model/, groups/CASE/*.arrow, and gets `meeting`, and from rank 0 `outcome.pt`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_args

import torch

from asyncrl.config.objective import Aggregation, Objective, Preset, TokenAge
from asyncrl.config.recipe import Buffer, Learner, Recipe
from asyncrl.learners import step as learner
from asyncrl.learners.advantages import scaled
from asyncrl.learners.optimize import Optimizer
from asyncrl.learners.parallel import Ranks, Sharded, in_folder
from asyncrl.learners.shares import share_of
from asyncrl.learners.step import accumulate, train_step
from asyncrl.learners.trained import load_trained
from asyncrl.schema import decode

CASES = ("non-finite", "impossible", "unscored", "too old", "masked for its age", "empty", "all unscored")
"""What is the matter with the groups of the last rank; in the last case, with all."""

LAST = (3, 4)
"""The groups of the last rank. The first has 0, 1 and 2."""

IMPOSSIBLE = 23
"""The token that the learner gives no chance, and the groups of the last rank have in the case of that name."""

VERSION = 2
LIMIT_S = 240.0


def outcome(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """On rank 0: of each case and aggregation a step; of each preset a gradient."""
    predictions = learner.token_predictions

    def impossible(model: Any, token_ids: torch.Tensor, *rest: Any, **named: Any) -> Any:
        found = predictions(model, token_ids, *rest, **named)
        return found._replace(logprobs=torch.where(token_ids == IMPOSSIBLE, -torch.inf, found.logprobs))

    learner.token_predictions = impossible
    try:
        return _outcome(ranks, folder)
    finally:
        learner.token_predictions = predictions


def _outcome(ranks: Ranks, folder: Path) -> dict[str, Any]:
    steps = {
        (case, aggregation): step(ranks, folder, case, aggregation)
        for case in CASES
        for aggregation in get_args(Aggregation)
    }
    return {"steps": steps, "gradients": {preset: gradient(ranks, folder, preset) for preset in get_args(Preset)}}


def recipe_of(case: str, objective: Objective) -> Recipe:
    return Recipe(
        learner=Learner(learning_rate=1e-2, warmup_steps=0),
        buffer=Buffer(max_trajectory_age=1 if case == "too old" else 2, over_age="mask"),
        objective=objective,
    )


def step(ranks: Ranks, folder: Path, case: str, aggregation: Aggregation) -> dict[str, Any]:
    """Weights before and after, loss, tokens, and whether it was skipped."""
    age = [TokenAge(max_age=1)] if case == "masked for its age" else []
    recipe = recipe_of(case, Objective(preset="grpo", aggregation=aggregation, mask=age))
    model = load_trained(recipe.model, folder / "model", None, seed=0)
    whole = ranks.shard(model)
    optimizer = Optimizer(model, recipe.learner, ranks)
    before = weights(ranks, model, whole)
    result = train_step(
        *(model, optimizer, *own_share(ranks, folder, case, recipe)),
        objective=recipe.objective,
        temperature=1.0,
        max_tokens=25,
        longest=12,
        ranks=ranks,
    )
    tokens, nonfinite = ranks.total([result.seen.tokens, result.seen.nonfinite])
    return {
        "before": before,
        "after": weights(ranks, model, whole),
        "account": [result.seen.loss_sum, result.seen.units, tokens, nonfinite, result.updates.grad_norm],
        "skipped": result.updates.skipped,
    }


def gradient(ranks: Ranks, folder: Path, preset: Preset) -> dict[str, torch.Tensor]:
    """Of groups in which nothing is the matter."""
    recipe = recipe_of("", Objective(preset=preset))
    model = load_trained(recipe.model, folder / "model", None, seed=0)
    ranks.shard(model)
    batch, worth = own_share(ranks, folder, "sound", recipe)
    worth = scaled(batch.rewards, batch.answers, worth, recipe.objective.advantage, total=ranks.total)
    seen = accumulate(
        model, batch, worth, objective=recipe.objective, temperature=1.0, max_tokens=25, longest=12, ranks=ranks
    )
    (units,) = ranks.total([seen.units])
    return {name: ranks.whole(p.grad / units).clone() for name, p in model.named_parameters() if p.grad is not None}


def own_share(ranks: Ranks, folder: Path, case: str, recipe: Recipe) -> Any:
    paths = sorted((folder / "groups" / case).glob("*.arrow"))
    chosen = [n for n in range(len(paths)) if ranks.size == 1 or (n in LAST) == (ranks.rank > 0)]
    return share_of([decode(paths[n].read_bytes()) for n in chosen], version=VERSION, recipe=recipe)


def weights(ranks: Ranks, model: Any, whole: Any) -> dict[str, torch.Tensor]:
    ranks.gather(model, whole)
    return {name: p.detach().clone() for name, p in whole.named_parameters()}


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    ranks = Sharded(rank, size, meeting=in_folder(folder / "meeting", rank, size), step_s=LIMIT_S, silence_s=LIMIT_S)
    found = outcome(ranks, folder)
    if rank == 0:
        torch.save(found, folder / "outcome.pt")
    ranks.close()


if __name__ == "__main__":
    main()
