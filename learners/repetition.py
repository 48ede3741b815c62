"""How much an answer repeats itself, by its tokens: what a policy does that has found a loop which pays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncrl.schema import Packed

WIDTH = 4
"""Tokens of a gram: long enough that ordinary text seldom has one twice, short enough to see a loop of a few words."""

ROWS = 256
"""Rows looked at, spread over the batch: their mean is then known to a few hundredths, whatever the batch's size."""

_FACTOR = np.uint64(6364136223846793005)  # odd, so that multiplying by it loses nothing (Knuth's MMIX generator)


def repeated(token_ids: NDArray[np.int32]) -> float | None:
    """Share of the grams of an answer that it had before; None for one too short to have two.

    >>> repeated(np.arange(100, dtype=np.int32)), repeated(np.tile(np.arange(4, dtype=np.int32), 25))
    (0.0, 0.9587628865979382)
    """
    grams = len(token_ids) - WIDTH + 1
    if grams < 2:
        return None
    ids = token_ids.astype(np.uint64)
    hashed = np.zeros(grams, np.uint64)
    for n in range(WIDTH):
        hashed = hashed * _FACTOR + ids[n : n + grams]
    return 1.0 - len(np.unique(hashed)) / grams


def repetition(packed: Packed) -> float | None:
    """Mean over the sampled tokens of rows of the batch, those too short left out; None if all are."""
    rows = np.unique(np.linspace(0, len(packed.rewards) - 1, ROWS).astype(np.int64))
    found = []
    for row in rows.tolist():
        tokens = slice(packed.cu_seqlens[row], packed.cu_seqlens[row + 1])
        share = repeated(packed.token_ids[tokens][packed.loss_mask[tokens] == 1])
        if share is not None:
            found.append(share)
    return float(np.mean(found)) if found else None
