"""Drawing tokens and saying with which log-probability each was drawn.

A token is a pure function of (logits, temperature, request seed, position): one uniform number per position, from a
counter-based generator keyed by the seed, looked up in the cumulative distribution. Which other requests share the
batch, and in which slot a request sits, can therefore change a token only through the rounding of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

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
