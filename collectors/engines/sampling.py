"""Drawing tokens and saying with which log-probability each was drawn.

A token is a pure function of (logits, sampling, request seed, position): one uniform number per position, from a
counter-based generator keyed by the seed, looked up in the cumulative distribution. Which other requests share the
batch, and in which slot a request sits, can therefore change a token only through the rounding of the logits.

What may not be drawn is left out first (`may_draw`, `left_in`): the logits of the rest are all that `draw` sees, so
that what it reports is the log-probability among the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

from asyncrl.collectors.engines.base import Sampling

_GRID_BITS = 52
"""Uniforms are multiples of 2**-52. On this grid u * total < total holds in float64 for every u < 1, so the lookup can
never run past the last token that has any mass; with all 53 bits it could."""
_SPARE_BITS = np.uint64(64 - _GRID_BITS)


def uniforms(seed: int, count: int) -> NDArray[np.float64]:
    """The first `count` uniform numbers in [0, 1) of a request, float64 [count]; number t decides its token t.

    Philox 4x64 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): the key is the seed, the counter
    the position; hence equal on every machine and independent between neighbouring seeds. `seed` is in [0, 2**128).
    """
    raw = np.random.Philox(_Key(seed)).random_raw(count)  # type: ignore[arg-type]  # the stub lacks ISeedSequence
    return (raw >> _SPARE_BITS).astype(np.float64) * 2.0**-_GRID_BITS


class _Key(ISeedSequence):
    """The seed itself as Philox's key. `Philox(key=seed)` is the same generator, but asks the operating system for
    entropy that it then throws away, which takes longer than all the rest."""

    def __init__(self, seed: int) -> None:
        self._words = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF, seed >> 64], dtype=np.uint64)

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[np.uint64]:
        return self._words


def truncates(sampling: Sampling) -> bool:
    """Whether some tokens are left out for being unlikely. Greedy takes the likeliest anyway, and reports it among all.

    >>> truncates(Sampling(top_p=0.9)), truncates(Sampling(top_k=5, temperature=0.0)), truncates(Sampling())
    (True, False, False)
    """
    cut = sampling.top_k != -1 or sampling.top_p < 1 or sampling.min_p > 0
    return cut and sampling.temperature > 0


def may_draw(logits: torch.Tensor, samplings: Sequence[Sampling], barred: Sequence[Collection[int]]) -> torch.Tensor:
    """Which tokens each row may draw, bool [n, vocabulary].

    logits [n, vocabulary] of any floating dtype; barred: per row, ids that may not be drawn whatever their mass. Of the
    others at temperature T, in this order, each on what the one before left, renormalised:

    - top_k: the k likeliest; all, where there are no more;
    - top_p: the fewest likeliest whose mass reaches p (Holtzman et al., arXiv 1904.09751): the one that crosses it is
      kept, one at least;
    - min_p: those of at least min_p times the mass of the likeliest (Nguyen et al., arXiv 2407.01082).

    Among equal logits the lower id is the likelier one: exactly k are kept, also on ties.
    """
    scores = logits.float()
    allowed = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    for row, ids in enumerate(barred):
        # A stop token that the model has no logit for is barred by having none.
        if known := [id for id in ids if 0 <= id < scores.shape[1]]:
            allowed[row, known] = False
    if cut := [row for row, sampling in enumerate(samplings) if truncates(sampling)]:
        rows = torch.tensor(cut, device=scores.device)
        rest = scores[rows].masked_fill(~allowed[rows], -torch.inf)
        allowed[rows] &= _likeliest(rest, [samplings[row] for row in cut])
    return allowed


def _likeliest(scores: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """What top_k, top_p and min_p keep, bool [n, vocabulary]. scores float32, -inf where barred."""
    size = scores.shape[1]

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=scores.device)[:, None]

    top_k = [size if s.top_k == -1 else min(s.top_k, size) for s in samplings]
    ranked = scores.topk(max(top_k), dim=-1).values
    rank = torch.arange(ranked.shape[1], device=scores.device)
    # In float64 as in `draw`: over a large vocabulary a float32 sum would be off by more than a rare token's mass.
    tempered = ranked.double() / column([s.temperature for s in samplings])
    tempered = tempered.masked_fill(rank >= column(top_k), -torch.inf)
    mass = tempered.softmax(dim=-1)
    before = mass.cumsum(dim=-1) - mass
    # 2: also where the sum is off by a rounding step, top_p 1 keeps all.
    kept = (tempered > -torch.inf) & (before < column([s.top_p if s.top_p < 1 else 2.0 for s in samplings]))
    kept &= mass >= column([s.min_p for s in samplings]) * mass[:, :1]
    # All three keep a beginning of the ranking, so that how many it is says which, but for ties.
    count = kept.sum(dim=-1, keepdim=True)
    last = ranked.gather(1, (count - 1).clamp_(min=0))
    above, level = scores > last, scores == last
    return above | (level & (level.cumsum(dim=-1) <= count - above.sum(dim=-1, keepdim=True)))


def support_of(kept: torch.Tensor) -> list[NDArray[np.int32]]:
    """Each row of `kept`, bool [n, vocabulary], in the words of schema.Support: the ids that it may draw, or the ~id of
    those it may not, where they are fewer; nothing, if it may draw all."""
    supports = []
    for row in kept.cpu().numpy():
        ids = np.flatnonzero(row)
        if 2 * len(ids) > len(row):
            ids = ~np.flatnonzero(~row)[::-1]
        supports.append(ids.astype(np.int32))
    return supports


def left_in(logits: torch.Tensor, rows: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """`logits` as float32, those that `rows` int64 [m] may not draw by `kept` bool [m, vocabulary] at -inf."""
    logits = logits.float()
    return logits.index_copy(0, rows, logits[rows].masked_fill(~kept, -torch.inf))


def draw(
    logits: torch.Tensor, temperatures: Sequence[float], uniform: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row from softmax(logits / temperature) by inversion of its cumulative distribution.

    logits [n, vocabulary] of any floating dtype; temperatures and uniform hold n numbers. Temperature 0 takes the
    argmax and reports its log-probability at temperature 1.

    Returns (token ids int64 [n], log-probabilities float32 [n] in nats). A row whose logits define no distribution (a
    NaN among them) gets a NaN log-probability: the caller must look.
    """
    logits = logits.float()
    if any(t not in (0.0, 1.0) for t in temperatures):
        scale = torch.tensor([t or 1.0 for t in temperatures], device=logits.device)
        logprobs = torch.log_softmax(logits / scale[:, None], dim=-1)
    else:
        logprobs = torch.log_softmax(logits, dim=-1)
    # float64 sums: in float32 the error over a large vocabulary exceeds the mass of rare tokens.
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    at = torch.tensor(uniform, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
    # right=True: the first token whose cumulative mass exceeds `at`, hence never one without mass.
    ids = torch.searchsorted(cumulative, at, right=True).clamp_(max=logits.shape[-1] - 1)
    if 0.0 in temperatures:
        greedy = torch.tensor([t == 0.0 for t in temperatures], device=logits.device)[:, None]
        ids = torch.where(greedy, logits.argmax(dim=-1, keepdim=True), ids)
    return ids.squeeze(1), logprobs.gather(1, ids).squeeze(1)
