"""Where the sequences of a pack lie, and what of them attention has to compute.

Sequences that begin alike, as the members of a group do, can share that beginning: its tokens pass through the model
once (`shared_prefixes`). Attention then asks for each sequence's own tokens only, those that none before it has; they
look at all of their sequence, the shared beginning included. However deep the sharing goes, no pair of a query and a
key is computed twice, so the cost is

    sum over sequences of own tokens x tokens        (without sharing: the sum of squared lengths)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# Up to this many tokens attention is all call overhead: such sequences share a bucket whatever their lengths, and on a
# CPU the few products that attention consists of take half the time of the fused kernel, whose blocks they leave empty.
SHORT = 64

# What a call of attention costs beside its pairs of query and key, in such pairs: with gathering and both directions,
# about 0.2 ms on a CPU core. On a GPU it is an estimate, between what it is for a small and for a large model.
CALL_ON_CPU, CALL_ON_GPU = 1 << 12, 1 << 20


class Bucket(NamedTuple):
    """`rows` sequences that attention computes in one call, as if each had `longest` tokens, of which the last `own`
    are asked for. queries [rows * own] and keys [rows * longest]: flat places of these tokens among those computed."""

    queries: Tensor
    keys: Tensor
    rows: int
    own: int
    longest: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A pack, worked out once per pass and used by every layer. M tokens pass through the model: those of all
    sequences, or fewer where sequences share beginnings."""

    size: int  # M
    buckets: tuple[Bucket, ...]
    back: Tensor | None  # [M] place of each in the concatenated outputs of the buckets; None: they are the pack itself

    @classmethod
    def of(cls, lengths: list[int], device: torch.device, places: Tensor | None = None) -> Layout:
        """lengths: tokens per sequence, in pack order. places [sum(lengths)]: `shared_prefixes`, None: no sharing."""
        if places is None and len(set(lengths)) == 1:
            everything = torch.arange(sum(lengths), device=device)
            bucket = Bucket(everything, everything, len(lengths), lengths[0], lengths[0])
            return cls(sum(lengths), (bucket,), None)
        if places is None:
            places = torch.arange(sum(lengths))
        size = int(places.max()) + 1
        total = torch.tensor(lengths)
        # Numbers of places only grow, so a sequence's own are those beyond all before it. One that ends within the
        # one before it has none, and no part in attention.
        last = places[total.cumsum(0) - 1]
        before = torch.cat([torch.tensor([-1]), last.cummax(0).values[:-1]])
        own = (last - before).clamp(min=0)
        begins = total.cumsum(0) - total
        buckets: list[Bucket] = []
        back = torch.empty(size, dtype=torch.int64)
        offset = 0
        call = CALL_ON_CPU if device.type == "cpu" else CALL_ON_GPU
        for rows in _bucketed(lengths, own.tolist(), call):
            tokens, first = total[rows][:, None], begins[rows][:, None]
            shared = int((tokens - own[rows][:, None]).min())
            column = torch.arange(int(tokens.max()))[None, :]
            # Past a sequence's end its own last token is repeated: causal attention never looks there from before it.
            keys = places[first + torch.minimum(column, tokens - 1)]
            queries = keys[:, shared:]
            # A query that is computed in several rows has the same output in each; any one of them is taken back.
            real = (column < tokens)[:, shared:]
            back[queries[real]] = (offset + torch.arange(queries.numel()).view_as(queries))[real]
            offset += queries.numel()
            flat = keys.flatten().to(device)
            asked = flat if shared == 0 else queries.flatten().to(device)
            buckets.append(Bucket(asked, flat, len(rows), queries.shape[1], keys.shape[1]))
        return cls(size, tuple(buckets), back.to(device))


def shared_prefixes(token_ids: Tensor, lengths: list[int]) -> Tensor:
    """Where each token of a pack is computed when a sequence takes over what it begins with from the one before it.

    token_ids int64 [N], on the CPU; lengths: tokens per sequence. Returns int64 [N]: places 0 .. M - 1, M <= N, in
    order of first use. In a causal model what a token becomes depends on itself and its predecessors only.

    >>> shared_prefixes(torch.tensor([5, 6, 7, 5, 6, 8, 9, 6, 7]), [3, 4, 2]).tolist()
    [0, 1, 2, 0, 1, 3, 4, 5, 6]
    """
    places = np.empty(sum(lengths), np.int64)
    ids = token_ids.numpy()
    size = before = start = 0
    for length in lengths:
        most = min(length, start - before)  # 0 for the first: nothing lies before it
        differ = ids[before : before + most] != ids[start : start + most]
        shared = int(differ.argmax()) if differ.any() else most
        places[start : start + shared] = places[before : before + shared]
        places[start + shared : start + length] = np.arange(size, size + length - shared)
        size += length - shared
        before, start = start, start + length
    return torch.from_numpy(places)


def _bucketed(lengths: list[int], own: list[int], call: int) -> Iterator[list[int]]:
    """Rows that have tokens of their own, in buckets: all short ones in one, and of the others each in that of the one
    before it, or in a new one if filling up costs more pairs of query and key than a call does.

    They come by what they share, then by length, each descending, so that neighbours are alike.
    """
    rows = [row for row, tokens in enumerate(own) if tokens]
    if short := [row for row in rows if lengths[row] <= SHORT]:
        yield short
    long = [row for row in rows if lengths[row] > SHORT]
    bucket: list[int] = []
    longest = asked = 0
    for row in sorted(long, key=lambda row: (own[row] - lengths[row], -lengths[row])):
        most = max(longest, lengths[row])
        wider = most - (lengths[row] - own[row])
        if bucket and (len(bucket) + 1) * most * wider - len(bucket) * longest * asked > call + own[row] * lengths[row]:
            yield bucket
            bucket, most, wider = [], lengths[row], own[row]
        bucket.append(row)
        longest, asked = most, wider
    if bucket:
        yield bucket
