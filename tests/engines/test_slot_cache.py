"""The cache's columns: what joins, moves and leaves, without a model."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.collectors.engines.kv import KeysValues, SlotCache

SLOTS = 5


def left_padded(contents: list[list[float]]) -> KeysValues:
    """What a forward over these rows would leave, one head of size 1; its padding is NaN."""
    width = max(map(len, contents))
    keys = torch.tensor([[float("nan")] * (width - len(row)) + row for row in contents])[:, None, :, None]
    return [(keys, -keys)]


def test_nan_in_padding_never_enters_the_cache() -> None:
    cache = SlotCache(SLOTS)
    cache.append(left_padded([[1.0, 2.0, 3.0], [4.0]]), [0, 1, 1], [3, 1, 1])
    assert cache.slot_layers[0].keys.isfinite().all()
    assert cache.slot_layers[0].values.isfinite().all()


def test_a_row_that_ends_leaves_no_nan_behind() -> None:
    cache = SlotCache(SLOTS)
    cache.append(left_padded([[1.0, 2.0], [float("nan")]]), [0, 1], [2, 1])
    assert cache.remove([1]) == [0]
    assert cache.slot_layers[0].keys.isfinite().all()


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_every_row_holds_its_own_tokens_whatever_joins_moves_and_leaves(data: st.DataObject) -> None:
    cache, rows, token = SlotCache(SLOTS), [], 0.0
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["join", "step", "step", "step", "leave"]))
        if action == "join" and len(rows) < SLOTS:
            count = data.draw(st.integers(1, SLOTS - len(rows)))
            new = []
            for _ in range(count):
                length = data.draw(st.integers(1, 120))
                new.append([token + n for n in range(length)])
                token += length
            cache.append(left_padded(new), range(count), [len(row) for row in new])
            rows += new
        elif action == "step" and rows:
            cache.reserve()
            mask, positions = cache.inputs()
            assert positions.squeeze(1).tolist() == [len(row) for row in rows]
            rows = [[*row, token + n] for n, row in enumerate(rows)]
            token += len(rows)
            newest = torch.tensor([row[-1] for row in rows])[:, None, None, None]
            keys, values = cache.update(newest, -newest, 0)
            cache.advance()
            for row, held, seen, negated in zip(rows, mask, keys, values, strict=True):
                assert seen[0, held, 0].tolist() == row
                assert negated[0, held, 0].tolist() == [-x for x in row]
        elif action == "leave" and rows:
            gone = data.draw(st.sets(st.integers(0, len(rows) - 1), min_size=1))
            rows = [rows[row] for row in cache.remove(sorted(gone))]
        assert cache.lengths == [len(row) for row in rows]
        assert cache.width <= cache.end <= cache.capacity
