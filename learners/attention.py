"""Attention within each sequence of a pack, never across: what transformers' models call in the place of their own.

Embeddings, projections and MLPs see one row of tokens. Attention is the only place where they meet, so it is the only
place that knows where sequences end (`layout.py`): `packed_attention` is registered with transformers under `PACKED`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from asyncrl.learners.layout import SHORT, Layout

PACKED = "asyncrl_packed"

# A context variable and not a keyword argument: older and remote model code does not pass unknown keywords down.
_layout: ContextVar[Layout | None] = ContextVar("asyncrl_packed_layout", default=None)


def current_layout() -> Layout | None:
    """Of the pack that is being computed, None outside of one."""
    return _layout.get()


@contextmanager
def laid_out(layout: Layout | None) -> Iterator[None]:
    """What is computed in here is a pack of this layout."""
    token = _layout.set(layout)
    try:
        yield
    finally:
        _layout.reset(token)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of the current pack; transformers' attention interface.

    query [1, heads, M, head_dim], key and value [1, kv_heads, M, head_dim] -> [1, M, heads, head_dim]. The mask that
    transformers made, if any, is ignored: it does not know the sequences. Keywords not named here that change the
    result (sinks, position biases) are found by the comparison in `pack_attention`.
    """
    layout = current_layout()
    if layout is None:
        raise RuntimeError(
            f"attention {PACKED!r} works only inside asyncrl's token_logprobs; to call the model itself set `sdpa`"
        )
    if query.shape[0] != 1 or query.shape[2] != layout.size:
        raise RuntimeError(f"packed attention got queries {tuple(query.shape)} for a pack of {layout.size} tokens")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [M, heads, head_dim]

    def take(x: Tensor, places: Tensor, rows: int, length: int) -> Tensor:
        taken = x if layout.back is None else x.index_select(0, places)
        return taken.reshape(rows, length, *x.shape[1:]).transpose(1, 2)

    outputs = []
    for queries, keys, rows, own, longest in layout.buckets:
        output = _causal(
            take(q, queries, rows, own),
            take(k, keys, rows, longest),
            take(v, keys, rows, longest),
            scaling,
            dropout,
            sliding_window,
            softcap,
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    if layout.back is None:
        return outputs[0][None], None
    together = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return together.index_select(0, layout.back)[None], None


def _causal(
    q: Tensor, k: Tensor, v: Tensor, scaling: float | None, dropout: float, window: int | None, softcap: float | None
) -> Tensor:
    """q [rows, heads, own, head_dim], of the last tokens of each row; k and v [rows, kv_heads, length, head_dim] ->
    as q. A query sees its own token and those before it, of its row."""
    own, length = q.shape[2], k.shape[2]
    on_cpu = q.device.type == "cpu"
    windowed = window is not None and window < length
    if softcap is not None or (on_cpu and length <= SHORT):
        return _by_products(q, k, v, _bias(q, length, window), scaling, dropout, softcap)
    mask: Tensor | None = None
    if windowed:
        mask = _bias(q, length, window)
    elif 1 < own < length:
        # On a GPU this is a kernel without a mask. On a CPU it would be a mask that knows only true and false.
        mask = _bias(q, length, None) if on_cpu else causal_lower_right(own, length)
    if not on_cpu:
        # Of its kernels that take fewer heads of keys than of queries, a GPU has none for float32, none for masks.
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None and own > 1,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _bias(q: Tensor, length: int, window: int | None) -> Tensor:
    """[own, length]: 0 where the query of a row sees the key, -inf elsewhere."""
    own = q.shape[2]
    distance = torch.arange(length - own, length, device=q.device)[:, None] - torch.arange(length, device=q.device)
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return torch.zeros(own, length, dtype=q.dtype, device=q.device).masked_fill(hidden, -math.inf)


def _by_products(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scaling: float | None, dropout: float, softcap: float | None
) -> Tensor:
    """What attention stands for, its weights kept for the backward pass."""
    rows, heads, own, head_dim = q.shape
    kv_heads, length = k.shape[1:3]
    bias = bias.repeat(heads // kv_heads, 1)
    # Heads that share keys and values lie behind each other, as if they were one head with more queries: no copies.
    q = q.reshape(rows * kv_heads, -1, head_dim)
    k, v = (x.reshape(rows * kv_heads, length, head_dim) for x in (k, v))
    scale = head_dim**-0.5 if scaling is None else scaling
    if softcap is None:
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=scale)
    else:
        scores = softcap * torch.tanh(torch.bmm(q, k.transpose(1, 2)) * (scale / softcap)) + bias
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = F.dropout(torch.softmax(scores, dim=-1, dtype=wide), p=dropout)
    return torch.bmm(weights.to(v.dtype), v).view(rows, heads, own, head_dim)


ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
