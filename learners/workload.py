"""What it costs to train a group: by this, and not by its tokens, a step's groups are dealt to ranks.

Floating-point operations of a forward pass grow with three things: the tokens that pass through the layers' matrices;
the trained ones, which alone pass through the head; and the pairs of a query and a key that it looks at, about half the
square of a sequence's length. What the members of a group begin with alike counts once (`layout.py`).

    work = token * tokens + prediction * trained + pair * sum over own tokens of (1 + those before them)

A gradient makes each of them three times as much: its products are two of the same size. A group from which there is
nothing to learn goes without.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from asyncrl.learners.attention import PACKED
from asyncrl.learners.batch import Batch, Microbatch, microbatches
from asyncrl.learners.layout import shared_prefixes


class Costs(NamedTuple):
    """Floating-point operations of a model's forward pass."""

    token: int  # for each that passes through the layers
    prediction: int  # for each log-prob
    pair: int  # for each query and each key it looks at, in all layers
    shares: bool = True  # whether sequences are packed, and share what they begin with


def costs_of(model: PreTrainedModel) -> Costs:
    """Each weight of a matrix makes one multiplication and one addition for each token, each dimension of a head as
    many for a pair, twice: for its score and for its value. Of a mixture all experts count, of a window nothing is
    taken off. A model without attention heads has no pairs.

    `model` may be sharded.
    """
    text = model.config.get_text_config()
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    apart = {
        id(p) for module in (model.get_input_embeddings(), head) if module is not None for p in module.parameters()
    }
    matrices = sum(p.numel() for p in model.parameters() if p.ndim >= 2 and id(p) not in apart)
    heads = getattr(text, "num_attention_heads", None) or 0
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads) if heads else 0
    return Costs(
        token=2 * matrices,
        prediction=2 * text.hidden_size * text.vocab_size,
        pair=4 * width * text.num_hidden_layers if heads else 0,
        shares=model.config._attn_implementation == PACKED,
    )


def group_work(batch: Batch, costs: Costs, taught: NDArray[np.bool_]) -> list[int]:
    """Of each group of the batch. taught bool [rows]: whether its group has a gradient. 0 where no token is trained."""
    count = batch.count
    trained = np.bincount(batch.of_tokens(batch.groups)[batch.trained.numpy()], minlength=count)
    work = costs.prediction * trained.astype(object)  # of integers without a limit
    for micro in microbatches(batch, np.ones(len(batch.groups), np.bool_), len(batch.token_ids)):  # one, or none
        starts = micro.cu_seqlens.numpy()
        lengths = np.diff(starts)
        groups = batch.of_tokens(batch.groups)[micro.positions.numpy()[starts[:-1]]]
        own = _own_tokens(batch, micro, groups) if costs.shares else lengths
        before = lengths - own
        pairs = (lengths * (lengths + 1) - before * (before + 1)) // 2
        for group, tokens, seen in zip(groups.tolist(), own.tolist(), pairs.tolist(), strict=True):
            work[group] += costs.token * tokens + costs.pair * seen
    passes = np.where(np.bincount(batch.groups[taught], minlength=count) > 0, 3, 1)
    return [int(one) * int(times) for one, times in zip(work, passes, strict=True)]


def _own_tokens(batch: Batch, micro: Microbatch, groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """[rows'] of each sequence, those that it does not take over from the one before it in its group."""
    starts = micro.cu_seqlens.numpy()
    places = shared_prefixes(batch.token_ids[micro.positions], np.diff(starts).tolist()).numpy()
    new = np.diff(np.maximum.accumulate(places), prepend=-1) > 0
    counts: NDArray[np.int64] = np.add.reduceat(new.astype(np.int64), starts[:-1])
    return np.where(np.diff(groups, prepend=-1) != 0, np.diff(starts), counts)  # the group before may be elsewhere


def imbalance(work: list[int], shares: list[list[int]]) -> float:
    """Work of the rank that has most, over their mean; 1 where nobody has any.

    >>> imbalance([3, 1, 2], [[0], [1, 2]]), imbalance([3, 1, 2], [[0, 1], [2]])
    (1.0, 1.3333333333333333)
    """
    carried = [sum(work[group] for group in share) for share in shares]
    return max(carried) * len(carried) / sum(carried) if sum(carried) else 1.0
