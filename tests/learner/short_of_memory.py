"""Steps in a process whose address space is limited for real: `python short_of_memory.py FOLDER`.

FOLDER holds model/ and groups/*.arrow. Prints what happens as JSON, by aggregation.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.objective import Objective
from asyncrl.config.recipe import Learner, Recipe
from asyncrl.learners.model import load_model
from asyncrl.learners.optimize import Optimizer
from asyncrl.learners.shares import share_of
from asyncrl.learners.shrinking import Budget
from asyncrl.learners.step import train_step
from asyncrl.schema import decode

BUDGET = 8192
"""Of which the batch fills one micro-batch."""

MARGIN = 96 << 20
"""Bytes beyond the peak of a step in half of the budget; a whole one needs several times as much."""


def trained(folder: Path, aggregation: Any, max_tokens: int | Budget) -> tuple[list[torch.Tensor], float]:
    """The weights of a fresh model after a step, and its loss."""
    recipe = Recipe(objective=Objective(preset="grpo", aggregation=aggregation))
    model = load_model(folder / "model", "float32", "auto")
    optimizer = Optimizer(model, Learner(learning_rate=1e-3, warmup_steps=0))
    groups = [decode(path.read_bytes()) for path in sorted((folder / "groups").glob("*.arrow"))]
    batch, worth = share_of(groups, version=1, recipe=recipe)
    options: Any = {"objective": recipe.objective, "temperature": 1.0, "max_tokens": max_tokens}
    loss = train_step(model, optimizer, batch, worth, **options).seen.loss
    return [p.detach().clone() for p in model.parameters()], loss


def peak() -> int:
    """Bytes of address space, the most so far."""
    found = re.search(r"VmPeak:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    halves = {aggregation: trained(folder, aggregation, BUDGET // 2) for aggregation in ("token", "prompt")}
    limit = peak() + MARGIN
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    told: dict[str, Any] = {}
    for aggregation, (weights, loss) in halves.items():
        unguarded = ""
        try:
            trained(folder, aggregation, BUDGET)
        except RuntimeError as error:
            unguarded = str(error)
        budget = Budget.of(BUDGET)
        found, same = trained(folder, aggregation, budget)
        told[aggregation] = {
            "unguarded": unguarded,
            "tokens": budget.tokens,
            "losses": [loss, same],
            "apart": max(float((a - b).abs().max()) for a, b in zip(weights, found, strict=True)),
        }
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main()
