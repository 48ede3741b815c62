"""torch's random numbers, of every rank: kept in a checkpoint, continued from there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from asyncrl.learners.parallel import Ranks

State = dict[str, torch.Tensor]
"""`cpu`, `cuda`: uint8 [n], as torch gives them; `cuda` is empty in a process that has no GPU."""


def gathered(ranks: Ranks, device: torch.device) -> list[State]:
    """The state of every rank, by its number, on rank 0; on the others nothing of use. device: where this rank
    computes. A collective."""
    own = {"cpu": torch.get_rng_state(), "cuda": torch.empty(0, dtype=torch.uint8)}
    if device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(device)
    row, end = torch.cat([own["cpu"], own["cuda"]])[None], len(own["cpu"])
    rows = ranks.collect(row, [row.shape[1]] * ranks.size)
    return [{"cpu": row[0, :end], "cuda": row[0, end:]} for row in rows]


def restore(states: Sequence[State], rank: int, device: torch.device) -> None:
    """Continue where the checkpoint left this rank. One that it has not, of a learner with fewer ranks, keeps the
    numbers that it has."""
    if rank >= len(states):
        return
    torch.set_rng_state(states[rank]["cpu"])
    if device.type == "cuda" and len(states[rank]["cuda"]):
        torch.cuda.set_rng_state(states[rank]["cuda"], device)


def of_format_1(rng: dict[str, Any]) -> list[State]:
    """What checkpoints had before: rank 0's alone, and there of every GPU that it saw."""
    return [{"cpu": rng["cpu"], "cuda": rng["cuda"][0] if rng["cuda"] else torch.empty(0, dtype=torch.uint8)}]
