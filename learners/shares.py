"""Which update and which rank trains which groups of a step, and how what the ranks saw becomes one step's account.

Pure. Groups stay whole: an advantage compares the members of one group, so each rank computes its own without asking.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.config.recipe import Recipe
from asyncrl.learners.advantages import compared
from asyncrl.learners.batch import Batch, make_batch
from asyncrl.learners.step import Seen
from asyncrl.schema import pack


def split(tickets: Sequence[int], updates: int) -> list[list[int]]:
    """Groups by update, each list ascending: the oldest tickets first, whatever the order in which they came. Two parts
    differ by one group at most, and none is empty: fewer groups than `updates` make fewer parts.

    Oldest first, since what older weights sampled is farther from the current ones, and each update adds to that.

    >>> split([7, 3, 9, 8, 4], updates=2)
    [[0, 1, 4], [2, 3]]
    """
    oldest_first = sorted(range(len(tickets)), key=lambda group: tickets[group])
    return [sorted(part.tolist()) for part in np.array_split(oldest_first, min(updates, len(tickets)))]


def deal(tickets: Sequence[int], loads: Sequence[int], *, updates: int, ranks: int) -> list[list[list[int]]]:
    """[update][rank] -> groups, ascending. A rank may get none of an update.

    >>> deal([3, 7, 4, 8], [1, 1, 1, 1], updates=2, ranks=2)
    [[[0], [2]], [[1], [3]]]
    """
    return [
        [[part[n] for n in share] for share in balance([loads[group] for group in part], ranks)]
        for part in split(tickets, updates)
    ]


def share_groups(shares: Sequence[Sequence[Sequence[int]]], rank: int) -> list[int]:
    """The groups of all updates that `deal` gave this rank, ascending: in this order it packs them."""
    return sorted(group for update in shares for group in update[rank])


def share_parts(shares: Sequence[Sequence[Sequence[int]]], rank: int) -> list[list[int]]:
    """By update, the same groups by their place among `share_groups`.

    >>> share_parts([[[0], [2]], [[1], [3]]], rank=1)
    [[0], [1]]
    """
    place = {group: n for n, group in enumerate(share_groups(shares, rank))}
    return [[place[group] for group in update[rank]] for update in shares]


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


def share_of(groups: Sequence[pa.RecordBatch], *, version: int, recipe: Recipe) -> tuple[Batch, NDArray[np.float64]]:
    """A share as a rank trains it, and the advantages of its rows: those that the whole batch would give them, before
    what needs the batch (`advantages.scaled`).

    Raises what `make_batch` raises: every rank checks what it trains."""
    if not groups:
        return Batch.empty(), np.empty(0)
    bound = recipe.buffer
    packed = pack(groups)
    batch = make_batch(packed, version=version, max_age=bound.max_trajectory_age, mask_older=bound.over_age == "mask")
    return batch, compared(packed, recipe).values


def positions_of(batch: Batch, share: Sequence[int]) -> NDArray[np.int64]:
    """Where the tokens of these groups lie in the batch, ascending: the order in which a rank packs its share."""
    return np.flatnonzero(np.isin(batch.of_tokens(batch.groups), share))


COLUMNS = (
    "included",
    "logprobs",
    "ratio",
    "clipped",
    "masked",
    "measured",
    "cut",
    "pulls",
    "entropy",
    "proximal",
    "reference",
)
"""Of `Seen`, what there is of each token."""


def as_message(seen: Seen) -> Tensor:
    """What a rank saw of its n tokens, as float32 [COLUMNS, n] to be sent to rank 0."""
    return torch.from_numpy(np.stack([getattr(seen, name).astype(np.float32) for name in COLUMNS]))


def combine(
    parts: Sequence[Tensor],
    positions: Sequence[NDArray[np.int64]],
    batch: Batch,
    *,
    loss_sum: float,
    units: float,
    idle_passes: int = 0,
) -> Seen:
    """One `Seen` of the whole batch from what the ranks sent of their shares and where the shares' tokens lie in it.
    loss_sum, units, idle_passes: of all ranks."""
    whole = np.zeros((len(COLUMNS), len(batch.token_ids)), dtype=np.float32)
    for part, at in zip(parts, positions, strict=True):
        whole[:, at] = part.numpy()
    column = dict(zip(COLUMNS, whole, strict=True))
    included, masked = column["included"] > 0, column["masked"].astype(np.uint8)
    return Seen(
        loss_sum=loss_sum,
        units=units,
        included=included,
        logprobs=column["logprobs"],
        ratio=column["ratio"],
        clipped=column["clipped"] > 0,
        masked=masked,
        measured=column["measured"] > 0,
        cut=column["cut"] > 0,
        pulls=column["pulls"],
        entropy=column["entropy"],
        proximal=column["proximal"],
        reference=column["reference"],
        nonfinite=batch.tokens - int(included.sum()) - int((masked > 0).sum()),
        idle_passes=idle_passes,
    )
