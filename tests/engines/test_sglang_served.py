"""Which published tensors a server's live ones are made of. Whether the hashes are SGLang's: `make test-sglang`."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.collectors.engines.sglang_served import TILE, TILES, layout, tiled
from asyncrl.weights.base import WeightsError

PUBLISHED = ["embed.weight", "l.0.q_proj.bias", "l.0.k_proj.bias", "l.0.v_proj.bias", "l.0.o_proj.weight"]


def test_a_fused_tensor_is_its_parts_in_the_order_of_their_rows() -> None:
    live = ["embed.weight", "l.0.qkv_proj.bias", "l.0.o_proj.weight", "lm_head.weight"]
    assert layout(live, PUBLISHED, {"lm_head.weight": "embed.weight"}) == {
        "embed.weight": ("embed.weight",),
        "l.0.qkv_proj.bias": ("l.0.q_proj.bias", "l.0.k_proj.bias", "l.0.v_proj.bias"),
        "l.0.o_proj.weight": ("l.0.o_proj.weight",),
        "lm_head.weight": ("embed.weight",),
    }


def test_what_is_served_and_not_published_or_published_and_not_served_is_named() -> None:
    with pytest.raises(WeightsError, match=r"also computes with l\.0\.bias, l\.0\.qkv_proj\.weight: not published"):
        layout([*PUBLISHED, "l.0.qkv_proj.weight", "l.0.bias"], PUBLISHED, {})
    with pytest.raises(WeightsError, match=r"has no l\.0\.o_proj\.weight"):
        layout(PUBLISHED[:-1], PUBLISHED, {})


def test_the_hash_tells_bytes_places_and_lengths_apart() -> None:
    data = np.arange(4 * TILE * TILES + 12, dtype=np.uint64).astype(np.uint8)
    changed = data.copy()
    changed[-1] ^= 1
    swapped = data.copy()
    swapped[[0, 4 * TILE]] = swapped[[4 * TILE, 0]] + 1
    variants = [data, changed, swapped, data[:-1], data[:-4], data[4:]]
    assert len({tiled([variant]) for variant in variants}) == len(variants)
    assert tiled([data]) == tiled([data[:4097], data[4097:]])
