"""Which rank trains which groups of a step, and how what the ranks saw becomes one step's account. Pure.

Groups stay whole: an advantage compares the members of one group, so each rank computes its own without asking.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.config.recipe import Recipe
from asyncrl.learners.advantages import advantages
from asyncrl.learners.batch import Batch, make_batch
from asyncrl.learners.step import Seen
from asyncrl.schema import pack


def balance(loads: Sequence[int], ranks: int) -> list[list[int]]:
    """Groups by rank, each list ascending: the heaviest group left goes to the rank with the least so far.

    Every group is in exactly one share, and the loads of two shares differ by at most the largest group (Graham's rule:
    what a rank got last, it got while it had the least). A rank may get none, where there are fewer groups than ranks.

    >>> balance([5, 1, 4, 2], ranks=2)
    [[0, 1], [2, 3]]
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    carried = [0] * ranks
    for group in sorted(range(len(loads)), key=lambda n: -loads[n]):  # stable: the same shares for the same batch
        lightest = min(range(ranks), key=lambda rank: carried[rank])
        shares[lightest].append(group)
        carried[lightest] += loads[group]
    return [sorted(share) for share in shares]


def group_loads(batch: Batch) -> list[int]:
    """Tokens of each group, prompts included: what its passes through the model cost."""
    return [int(n) for n in np.bincount(batch.groups, weights=batch.lengths)]


def share_of(groups: Sequence[pa.RecordBatch], *, version: int, recipe: Recipe) -> tuple[Batch, NDArray[np.float64]]:
    """A share as a rank trains it, and the advantages of its rows: those that the whole batch would give them.

    Raises what `make_batch` raises: every rank checks what it trains."""
    if not groups:
        return Batch.empty(), np.empty(0)
    bound = recipe.buffer
    batch = make_batch(
        pack(groups), version=version, max_age=bound.max_trajectory_age, mask_older=bound.over_age == "mask"
    )
    return batch, advantages(batch.rewards, batch.groups, recipe.objective.advantage).values


def positions_of(batch: Batch, share: Sequence[int]) -> NDArray[np.int64]:
    """Where the tokens of these groups lie in the batch, ascending: the order in which a rank packs its share."""
    return np.flatnonzero(np.isin(np.repeat(batch.groups, batch.lengths), share))


def as_message(seen: Seen) -> Tensor:
    """What a rank saw of its n tokens, as float32 [4, n] to be sent to rank 0."""
    columns = (seen.included, seen.logprobs, seen.ratio, seen.clipped)
    return torch.from_numpy(np.stack([column.astype(np.float32) for column in columns]))


def combine(parts: Sequence[Tensor], positions: Sequence[NDArray[np.int64]], batch: Batch, *, loss_sum: float) -> Seen:
    """One `Seen` of the whole batch from what the ranks sent of their shares and where the shares' tokens lie in it."""
    whole = np.zeros((4, len(batch.token_ids)), dtype=np.float32)
    for part, at in zip(parts, positions, strict=True):
        whole[:, at] = part.numpy()
    included = whole[0] > 0
    return Seen(
        loss_sum=loss_sum,
        included=included,
        logprobs=whole[1],
        ratio=whole[2],
        clipped=whole[3] > 0,
        nonfinite=batch.tokens - int(included.sum()),
    )
