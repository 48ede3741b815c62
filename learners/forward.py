"""Log-probs of packed sequences: many sequences back to back, no padding, no attention across them (`attention.py`).

Whether an architecture really does all its mixing in attention is not taken on trust: `pack_attention` compares it with
the model's own attention before it is used, and says why where it cannot be.

Sequences that begin alike, as the members of a group do, can share that beginning: its tokens pass through the model
once, attention included (`layout.py`). Only the tokens that are asked for reach the head.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.learners.attention import PACKED, laid_out
from asyncrl.learners.head import call_with_head, head_for
from asyncrl.learners.layout import Layout, shared_prefixes
from asyncrl.learners.predictions import Predicted, predicted_plainly
from asyncrl.schema import Support

# Rotary embeddings whose frequencies depend on the longest position in the batch: packing would couple sequences.
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
PACKABLE_LAYERS = {"full_attention", "sliding_attention", "attention"}

# A pass that has no more logits than this, 4 MiB in float32, computes all of them: choosing some would gain little.
FEW = 1 << 20


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
    asked: Tensor | None = None,
) -> Tensor:
    """The log-probs of `token_predictions` alone, float32 [N]."""
    return token_predictions(
        model,
        token_ids,
        cu_seqlens,
        temperature=temperature,
        share_prefixes=share_prefixes,
        support=support,
        asked=asked,
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
    asked: Tensor | None = None,
) -> Predicted:
    """Log-prob (nats) of each token given its predecessors in its own sequence; differentiable.

    token_ids int64 [N]: sequences back to back. cu_seqlens int64 [rows + 1]: sequence r is [cu[r], cu[r + 1]).
    Returns float32 [N]: log softmax(logits / temperature) at the token; with `spread` also entropy and collision of
    that distribution (see `Predicted`). asked: bool [N], the tokens that this is wanted of, None for all; the head,
    which may be the larger part of a pass, computes nothing else if there are more than FEW logits. The others, and the
    first token of each sequence, which nothing predicts, count as certain: log-prob and entropy 0, collision 1.
    share_prefixes: compute once what neighbours begin with, for packs of whole groups; the same numbers but for
    rounding, if the model packs at all.
    support: of N draws, what each token was drawn between, which is then what the distribution is over; None: all of
    the vocabulary. Raises ValueError if cu_seqlens does not describe token_ids.
    """
    cu = cu_seqlens.tolist()
    lengths = [end - start for start, end in itertools.pairwise(cu)]
    if not lengths or cu[0] != 0 or cu[-1] != token_ids.numel() or min(lengths) < 1:
        raise ValueError(
            f"cu_seqlens {cu} does not describe {token_ids.numel()} tokens: ascending, from 0 to their number"
        )
    device = token_ids.device
    wanted = torch.ones(cu[-1], dtype=torch.bool) if asked is None else asked.clone().cpu()
    wanted[cu[:-1]] = False
    chosen = wanted.nonzero().flatten()

    def predicted(input_ids: Tensor, of: Tensor, after: Tensor, **inputs: Tensor) -> Predicted:
        """Of the tokens at `of` [P], each after what is computed at input_ids[after[p]]."""
        drawn = None if support is None else support.take(of.numpy())
        return _predicted(model, input_ids, after, token_ids[of.to(device)], temperature, spread, drawn, **inputs)

    if model.config._attn_implementation == PACKED:
        input_ids, positions = token_ids, torch.cat([torch.arange(length) for length in lengths])
        places: Tensor | None = None
        after = chosen - 1  # what is computed at token i predicts token i + 1
        if share_prefixes:
            places = shared_prefixes(token_ids.cpu(), lengths)
            used = torch.empty(int(places.max()) + 1, dtype=torch.int64)
            used[places] = torch.arange(len(places))  # one of the tokens computed there: they are all alike
            input_ids, positions = token_ids[used.to(device)], positions[used]
            after = places[after]
        with laid_out(Layout.of(lengths, device, places)):
            found = [predicted(input_ids, chosen, after, position_ids=positions.to(device)[None])]
    else:
        found = [
            predicted(token_ids[start:end], of, of - 1 - start)
            for (start, end), of in zip(itertools.pairwise(cu), _in_each(chosen, cu), strict=True)
        ]

    def every(parts: Iterable[Tensor | None], certain: float) -> Tensor | None:
        """[N], from what was predicted in each pass."""
        known = [part for part in parts if part is not None]
        if not known:
            return None
        values = known[0] if len(known) == 1 else torch.cat(known)
        return values.new_full((cu[-1],), certain).index_copy(0, chosen.to(device), values)

    logprobs, entropy, collision = zip(*found, strict=True)
    values = every(logprobs, 0.0)
    assert values is not None
    return Predicted(values, every(entropy, 0.0), every(collision, 1.0))


def _in_each(chosen: Tensor, cu: list[int]) -> Iterable[Tensor]:
    """The ascending places `chosen`, sequence by sequence."""
    inner = torch.searchsorted(chosen, torch.tensor(cu[1:-1], dtype=torch.int64))
    return torch.tensor_split(chosen, inner)


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
    """Of each of `targets` [P] after what is computed at input_ids[rows[p]]; input_ids [M]. rows: on the CPU. support:
    of P draws."""
    dtype, device = _compute_dtype(model), input_ids.device
    kept: Tensor | None = None
    if len(input_ids) * model.config.get_text_config().vocab_size > FEW:
        needed = torch.zeros(len(input_ids), dtype=torch.bool)
        needed[rows] = True
        kept = needed.nonzero().flatten().to(device)
        rows = (needed.cumsum(0) - 1)[rows]
    rows = rows.to(device)
    # Tokens after the same prefix have a row of logits each, where they were drawn between others.
    tokens = len(input_ids) if kept is None else len(kept)
    head = head_for(model, dtype, tokens=tokens if support is None else max(tokens, len(targets)))
    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        if head is not None:
            return call_with_head(
                model,
                head,
                rows,
                targets,
                temperature,
                kept=kept,
                spread=spread,
                support=support,
                input_ids=input_ids[None],
                use_cache=False,
                **inputs,
            )
        chooses = kept is not None and _keeps_logits(type(model))
        only = {"logits_to_keep": kept} if chooses else {}
        logits: Tensor = model(input_ids=input_ids[None], use_cache=False, **inputs, **only).logits[0]
    if kept is not None and not chooses:
        logits = logits.index_select(0, kept)
    return predicted_plainly(logits, rows, targets, temperature=temperature, spread=spread, support=support)


def _keeps_logits(kind: type[PreTrainedModel]) -> bool:
    """Whether a model computes logits only where it is told to. Of code that came with a model it is not known whether
    it takes places, or only how many of the last."""
    of_transformers = any(base.__module__.startswith("transformers.models.") for base in kind.__mro__)
    return of_transformers and "logits_to_keep" in inspect.signature(kind.forward).parameters


def _compute_dtype(model: PreTrainedModel) -> torch.dtype:
    """What matrix products run in (`model.compute_dtype`, set by `load_model`); parameters stay float32."""
    dtype: torch.dtype = getattr(model, "compute_dtype", torch.float32)
    return dtype
