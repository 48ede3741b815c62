"""Log-probs of packed sequences: many sequences back to back, no padding, no attention across them.

Embeddings, projections and MLPs see one row of N tokens. Attention is the only place where tokens meet, so it is the
only place that knows where sequences end: `packed_attention` is registered with transformers under `PACKED` and splits
queries, keys and values there. Whether an architecture really does all its mixing there is not taken on trust:
`pack_attention` compares it with the model's own attention before it is used, and says why where it cannot be.

Sequences that begin alike, as the members of a group do, can share that beginning: its tokens pass through the model
once, and only attention repeats their queries, keys and values for each sequence (`shared_prefixes`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from asyncrl.learners.head import call_with_head, head_for
from asyncrl.learners.predictions import Predicted, predicted_plainly
from asyncrl.schema import Support

PACKED = "asyncrl_packed"

# Attention pads sequences to the longest of their bucket. Down to this share of it, one call costs less than two.
SHORTEST_IN_BUCKET = 0.75
# Up to this many tokens attention is all call overhead: such sequences share a bucket whatever their lengths, and on a
# CPU the few products that attention consists of take half the time of the fused kernel, whose blocks they leave empty.
SHORT = 64

# Rotary embeddings whose frequencies depend on the longest position in the batch: packing would couple sequences.
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
PACKABLE_LAYERS = {"full_attention", "sliding_attention", "attention"}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the sequences of a pack lie, worked out once per pass and used by every layer. M tokens pass through the
    model: those of all sequences, or fewer where sequences share beginnings."""

    size: int  # M
    buckets: tuple[tuple[Tensor, int, int], ...]  # (flat [rows * longest] places among the M, rows, longest)
    back: Tensor | None  # [M] place of each in the concatenated buckets; None: buckets are the pack itself

    @classmethod
    def of(cls, lengths: list[int], device: torch.device, places: Tensor | None = None) -> Layout:
        """lengths: tokens per sequence, in pack order. places [sum(lengths)]: `shared_prefixes`, None: no sharing."""
        if places is None and len(set(lengths)) == 1:
            everything = torch.arange(sum(lengths), device=device)
            return cls(sum(lengths), ((everything, len(lengths), lengths[0]),), None)
        if places is None:
            places = torch.arange(sum(lengths))
        size = int(places.max()) + 1
        starts = [0]
        for length in lengths[:-1]:
            starts.append(starts[-1] + length)
        buckets: list[tuple[Tensor, int, int]] = []
        back = torch.empty(size, dtype=torch.int64)
        offset = 0
        # A sequence that ends within the one before it has no output of its own. Numbers of places only grow.
        last = places[torch.tensor(lengths).cumsum(0) - 1].numpy()
        own = np.flatnonzero(last > np.maximum.accumulate([-1, *last[:-1]]))
        for rows in _buckets(lengths, own.tolist()):
            longest = lengths[rows[0]]
            first = torch.tensor([starts[row] for row in rows])[:, None]
            tokens = torch.tensor([lengths[row] for row in rows])[:, None]
            column = torch.arange(longest)[None, :]
            # Past a sequence's end its own last token is repeated: causal attention never looks there from before it.
            positions = places[first + torch.minimum(column, tokens - 1)]
            real = column < tokens
            # A shared token has several outputs, all of the same number; any one of them is taken back.
            back[positions[real]] = (offset + torch.arange(positions.numel()).view_as(positions))[real]
            offset += positions.numel()
            buckets.append((positions.flatten().to(device), len(rows), longest))
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


def _buckets(lengths: list[int], rows: list[int]) -> Iterator[list[int]]:
    """`rows` by descending length, cut where a row is much shorter than the first of its bucket."""
    bucket: list[int] = []
    for row in sorted(rows, key=lambda row: -lengths[row]):
        if bucket and lengths[row] < SHORTEST_IN_BUCKET * lengths[bucket[0]] and lengths[bucket[0]] > SHORT:
            yield bucket
            bucket = []
        bucket.append(row)
    yield bucket


# A context variable and not a keyword argument: older and remote model code does not pass unknown keywords down.
_layout: ContextVar[Layout | None] = ContextVar("asyncrl_packed_layout", default=None)


@contextmanager
def _packed(layout: Layout) -> Iterator[None]:
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
    layout = _layout.get()
    if layout is None:
        raise RuntimeError(
            f"attention {PACKED!r} works only inside asyncrl's token_logprobs; to call the model itself set `sdpa`"
        )
    if query.shape[0] != 1 or query.shape[2] != layout.size:
        raise RuntimeError(f"packed attention got queries {tuple(query.shape)} for a pack of {layout.size} tokens")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [M, heads, head_dim]
    outputs = []
    for positions, rows, longest in layout.buckets:

        def take(x: Tensor, positions: Tensor = positions, rows: int = rows, longest: int = longest) -> Tensor:
            taken = x if layout.back is None else x.index_select(0, positions)
            return taken.reshape(rows, longest, *x.shape[1:]).transpose(1, 2)

        output = _causal(take(q), take(k), take(v), scaling, dropout, sliding_window, softcap)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    if layout.back is None:
        return outputs[0][None], None
    together = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return together.index_select(0, layout.back)[None], None


def _causal(
    q: Tensor, k: Tensor, v: Tensor, scaling: float | None, dropout: float, window: int | None, softcap: float | None
) -> Tensor:
    """q [rows, heads, length, head_dim], k and v [rows, kv_heads, length, head_dim] -> as q; every row is causal from
    its own start."""
    rows, heads, length, head_dim = q.shape
    kv_heads = k.shape[1]
    windowed = window is not None and window < length
    if not windowed and softcap is None and not (length <= SHORT and q.device.type == "cpu"):
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=length > 1, scale=scaling)
    distance = torch.arange(length, device=q.device)
    distance = distance[:, None] - distance[None, :]
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    bias = torch.zeros(length, length, dtype=q.dtype, device=q.device).masked_fill(hidden, -math.inf)
    bias = bias.repeat(heads // kv_heads, 1)
    # Heads that share keys and values lie behind each other, as if they were one head with more queries: no copies.
    q = q.reshape(rows * kv_heads, -1, head_dim)
    k, v = (x.reshape(rows * kv_heads, length, head_dim) for x in (k, v))
    scale = head_dim**-0.5 if scaling is None else scaling
    if softcap is None:
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=scale)
    else:
        scores = softcap * torch.tanh(torch.bmm(q, k.transpose(1, 2)) * (scale / softcap)) + bias
    weights = F.dropout(torch.softmax(scores, dim=-1, dtype=torch.float32), p=dropout)
    return torch.bmm(weights.to(v.dtype), v).view(rows, heads, length, head_dim)


ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)


def pack_attention(model: PreTrainedModel) -> str | None:
    """Switch `model` to packed attention. None = done; else it is left as it was, and this is the reason.

    A model that stays as it was is computed by `token_logprobs` one sequence at a time: slower, as exact. Recurrent
    layers, ALiBi, code that comes with a model: whatever couples tokens outside the attention interface differs
    from the model's own attention on two short sequences, and is refused here.
    """
    before = model.config._attn_implementation
    if before == PACKED:
        return None
    text = model.config.get_text_config()
    layers = set(getattr(text, "layer_types", None) or ()) - PACKABLE_LAYERS
    if layers:
        return f"it has layers of type {', '.join(sorted(layers))}"
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = {str(part.get("rope_type")) for part in (rope, *rope.values()) if isinstance(part, dict)}
    if kinds & BATCH_DEPENDENT_ROPE:
        return (
            f"its rotary embedding ({', '.join(sorted(kinds & BATCH_DEPENDENT_ROPE))}) depends on the longest sequence"
        )

    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, text.vocab_size, (8,), generator=generator).to(model.device)
    token_ids[5:7] = token_ids[:2]  # so that the second shares the beginning of the first
    cu_seqlens = torch.tensor([0, 5, 8])
    with torch.no_grad():
        expected = token_logprobs(model, token_ids, cu_seqlens)
        try:
            model.set_attn_implementation(PACKED)
            if model.config._attn_implementation != PACKED:
                model.set_attn_implementation(before)  # of parts, where only some could take it
                return "its attention cannot be replaced"
            found = token_logprobs(model, token_ids, cu_seqlens, share_prefixes=True)
        except (TypeError, ValueError, RuntimeError) as error:
            model.set_attn_implementation(before)
            return f"packed attention fails in it: {str(error).splitlines()[0]}"
    # Float32 noise is 1e-6, a missing mask or bias 1e-2 and more; half precision is noisier by its own rounding.
    tolerance = 1e-4 if _compute_dtype(model) == torch.float32 else 5e-2
    difference = float((found - expected).abs().max())
    if not difference <= tolerance:
        model.set_attn_implementation(before)
        return f"its log-probs differ by {difference:.2g} when sequences are packed"
    return None


def token_logprobs(
    model: PreTrainedModel,
    token_ids: Tensor,
    cu_seqlens: Tensor,
    *,
    temperature: float = 1.0,
    share_prefixes: bool = False,
    support: Support | None = None,
) -> Tensor:
    """The log-probs of `token_predictions` alone, float32 [N]."""
    return token_predictions(
        model, token_ids, cu_seqlens, temperature=temperature, share_prefixes=share_prefixes, support=support
    ).logprobs


def token_predictions(
    model: PreTrainedModel,
    token_ids: Tensor,
    cu_seqlens: Tensor,
    *,
    temperature: float = 1.0,
    share_prefixes: bool = False,
    spread: bool = False,
    support: Support | None = None,
) -> Predicted:
    """Log-prob (nats) of each token given its predecessors in its own sequence; differentiable.

    token_ids int64 [N]: sequences back to back. cu_seqlens int64 [rows + 1]: sequence r is [cu[r], cu[r + 1]).
    Returns float32 [N]: log softmax(logits / temperature) at the token; with `spread` also entropy and collision of
    that distribution (see `Predicted`). The first token of each sequence, which nothing predicts, counts as certain:
    log-prob and entropy 0, collision 1. share_prefixes: compute once what neighbours begin with, for packs of whole
    groups; the same numbers but for rounding, if the model packs at all. support: of N draws, what each token was drawn
    between, which is then what the distribution is over; None: all of the vocabulary. Raises ValueError if cu_seqlens
    does not describe token_ids.
    """
    cu = cu_seqlens.tolist()
    lengths = [end - start for start, end in itertools.pairwise(cu)]
    if not lengths or cu[0] != 0 or cu[-1] != token_ids.numel() or min(lengths) < 1:
        raise ValueError(
            f"cu_seqlens {cu} does not describe {token_ids.numel()} tokens: ascending, from 0 to their number"
        )
    device = token_ids.device
    if model.config._attn_implementation == PACKED:
        input_ids, positions = token_ids, torch.cat([torch.arange(length) for length in lengths])
        places: Tensor | None = None
        predicting = torch.arange(len(token_ids) - 1)  # what is computed at token i predicts token i + 1
        if share_prefixes:
            places = shared_prefixes(token_ids.cpu(), lengths)
            used = torch.empty(int(places.max()) + 1, dtype=torch.int64)
            used[places] = torch.arange(len(places))  # one of the tokens computed there: they are all alike
            input_ids, positions = token_ids[used.to(device)], positions[used]
            predicting = places[:-1]
        with _packed(Layout.of(lengths, device, places)):
            found = [
                _predicted(
                    model,
                    input_ids,
                    predicting.to(device),
                    token_ids[1:],
                    temperature,
                    spread,
                    None if support is None else support.take(np.arange(1, len(token_ids))),
                    position_ids=positions.to(device)[None],
                )
            ]
    else:
        rows = torch.arange(max(lengths) - 1, device=device)
        found = [
            _predicted(
                model,
                token_ids[start:end],
                rows[: end - start - 1],
                token_ids[start + 1 : end],
                temperature,
                spread,
                None if support is None else support.take(np.arange(start + 1, end)),
            )
            for start, end in itertools.pairwise(cu)
        ]
    first = torch.zeros_like(token_ids, dtype=torch.bool)
    first[torch.tensor(cu[:-1], device=device)] = True

    def every(parts: Iterable[Tensor | None], certain: float) -> Tensor | None:
        """[N], from what was predicted of each pack's tokens but its first."""
        known = [F.pad(part, (1, 0)) for part in parts if part is not None]
        return torch.cat(known).masked_fill(first, certain) if known else None

    logprobs, entropy, collision = zip(*found, strict=True)
    values = every(logprobs, 0.0)
    assert values is not None
    return Predicted(values, every(entropy, 0.0), every(collision, 1.0))


def _predicted(
    model: PreTrainedModel,
    input_ids: Tensor,
    rows: Tensor,
    targets: Tensor,
    temperature: float,
    spread: bool,
    support: Support | None,
    **inputs: Tensor,
) -> Predicted:
    """Of each of `targets` [P] after what is computed at input_ids[rows[p]]; input_ids [M]. support: of P draws."""
    dtype = _compute_dtype(model)
    # Tokens after the same prefix have a row of logits each, where they were drawn between others.
    head = head_for(model, dtype, tokens=len(input_ids) if support is None else max(len(input_ids), len(targets)))
    with torch.autocast(input_ids.device.type, dtype=dtype, enabled=dtype != torch.float32):
        if head is not None:
            return call_with_head(
                model,
                head,
                rows,
                targets,
                temperature,
                spread=spread,
                support=support,
                input_ids=input_ids[None],
                use_cache=False,
                **inputs,
            )
        logits: Tensor = model(input_ids=input_ids[None], use_cache=False, **inputs).logits[0]
    return predicted_plainly(logits, rows, targets, temperature=temperature, spread=spread, support=support)


def _compute_dtype(model: PreTrainedModel) -> torch.dtype:
    """What matrix products run in (`model.compute_dtype`, set by `load_model`); parameters stay float32."""
    dtype: torch.dtype = getattr(model, "compute_dtype", torch.float32)
    return dtype
