"""Keys and values of the running requests, for any attention model that transformers can decode with left padding.

One row per request, rows dense (0 .. n-1), so that a decode step runs over the live ones only. All rows share one
clock: the newest token of every row is in column `end - 1`, a row of length L occupies the L columns before `end`.

    column    start            end
    row 0       k k k k k k k |          length 7
    row 1       . . . . k k k |          length 3: `.` is masked
    row 2       . . k k k k k |          length 5
                               ^ the next decode step writes here, for every row

Distances between columns are distances between positions, which is all that causal, sliding-window and ALiBi masks
look at: this is the layout of `generate` with left padding, which architectures support by contract. Lengths are
explicit; no token id means "padding". Rows join by a copy of prefilled columns and leave by a move of the last row into
the hole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

_SPARE_COLUMNS = 64
"""Columns allocated beyond the need, at least; half the need if that is more, so that a move of the window, which
copies all columns, is paid by at least half as many decode steps."""

KeysValues = list[tuple[torch.Tensor, torch.Tensor]]
"""What one forward left in a cache: per attention layer (keys, values), each [rows, heads, columns, head_dim]."""


class SlotCache(Cache):
    """The cache that decode steps run over. `append` rows, then per step `reserve`, one forward, `advance`."""

    def __init__(self, slots: int) -> None:
        self.slot_layers: list[SlotLayer] = []
        super().__init__(layers=[])
        self.slots = slots
        self.lengths: list[int] = []  # tokens held, per live row
        self.end = 0
        self.capacity = 0

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def width(self) -> int:
        """Columns before `end` that some live row occupies."""
        return max(self.lengths, default=0)

    def append(self, prefilled: KeysValues, source: Sequence[int], lengths: Sequence[int]) -> None:
        """New rows after the live ones: row i takes the last lengths[i] columns of row source[i] of `prefilled`.

        `prefilled` is what one left-padded forward left in a cache of full-length layers. Rows may share a source.
        """
        columns = max(lengths)
        if not self.slot_layers:
            self.slot_layers = [SlotLayer(self, keys, values) for keys, values in prefilled]
            self.layers = list(self.slot_layers)
        self.reserve(left=columns)
        first, last = self.rows, self.rows + len(lengths)
        device = prefilled[0][0].device
        index = torch.tensor(source, device=device)
        padding = torch.tensor(lengths, device=device)[:, None] <= torch.arange(columns - 1, -1, -1, device=device)
        for layer, (keys, values) in zip(self.slot_layers, prefilled, strict=True):
            for buffer, computed in ((layer.keys, keys), (layer.values, values)):
                block = computed[:, :, -columns:].index_select(0, index)
                # What attention computed for padding is arbitrary, even NaN, and a masked NaN value still spoils a
                # weighted sum: nothing but finite numbers may stand in masked columns.
                block.masked_fill_(padding[:, None, :, None], 0.0)
                buffer[first:last, :, self.end - columns : self.end] = block
        self.lengths.extend(lengths)

    def branch(self, source: Sequence[int], lengths: Sequence[int]) -> None:
        """New rows after the live ones that begin like live ones: row i takes the first lengths[i] columns of row
        source[i]."""
        for row, length in zip(source, lengths, strict=True):
            start, new = self.end - self.lengths[row], self.rows
            for layer in self.slot_layers:
                layer.branch(row, new, start, self.end - length, length)
            self.lengths.append(length)

    def reserve(self, *, left: int = 0, right: int = 1) -> None:
        """Make `left` columns before `end` and `right` from it on exist, moving the window or enlarging the buffers."""
        if left <= self.end and self.end + right <= self.capacity:
            return
        rows, width = self.rows, self.width
        end = max(left, width)
        capacity = max(self.capacity, end + right + max(_SPARE_COLUMNS, end // 2))
        for layer in self.slot_layers:
            layer.relocate(rows, width, self.end, end, capacity)
        self.end, self.capacity = end, capacity

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(attention mask bool [rows, width + 1], positions int64 [rows, 1]) of the next decode step."""
        device = self.slot_layers[0].keys.device
        lengths = torch.tensor(self.lengths, device=device)[:, None]
        age_of_column = torch.arange(self.width, -1, -1, device=device)
        return lengths >= age_of_column, lengths

    def advance(self) -> None:
        """After a forward wrote one token per row."""
        self.lengths = [length + 1 for length in self.lengths]
        self.end += 1

    def remove(self, rows: Sequence[int]) -> list[int]:
        """Forget these rows; the last live ones move into the holes.

        Returns the order of the survivors: new row i was row order[i].
        """
        gone = set(rows)
        left = self.rows - len(gone)
        holes = [row for row in range(left) if row in gone]
        movers = [row for row in range(left, self.rows) if row not in gone]
        for layer in self.slot_layers:
            layer.wipe(sorted(gone), self.end - self.width, self.end)
            layer.move(movers, holes, self.end - self.width, self.end)
        order = list(range(left))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        self.lengths = [self.lengths[row] for row in order]
        return order

    def clear(self) -> None:
        """Forget every row."""
        self.lengths = []


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One attention layer's part: keys and values [slots, heads, capacity, head_dim]. Sliding-window layers keep all
    columns too; the window is the mask's business."""

    is_sliding = False

    def __init__(self, cache: SlotCache, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache
        self.keys: torch.Tensor = keys.new_zeros(cache.slots, keys.shape[1], cache.capacity, keys.shape[3])
        self.values: torch.Tensor = values.new_zeros(cache.slots, values.shape[1], cache.capacity, values.shape[3])
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing left to do: shapes are known when the layer is made."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one column per live row at the clock and return the window that ends with it."""
        rows, start, end = self._cache.rows, self._cache.end - self._cache.width, self._cache.end + 1
        self.keys[:rows, :, end - 1 : end] = key_states
        self.values[:rows, :, end - 1 : end] = value_states
        return self.keys[:rows, :, start:end], self.values[:rows, :, start:end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.width + query_length, 0

    def get_seq_length(self) -> int:
        return self._cache.width

    def get_max_length(self) -> int:
        return -1

    def relocate(self, rows: int, width: int, old_end: int, new_end: int, capacity: int) -> None:
        """Move the window of `width` columns so that it ends at `new_end`, in buffers of `capacity` columns."""
        for name in ("keys", "values"):
            buffer: torch.Tensor = getattr(self, name)
            window = buffer[:rows, :, old_end - width : old_end].clone()  # old and new window may overlap
            if capacity > buffer.shape[2]:
                buffer = buffer.new_zeros(buffer.shape[0], buffer.shape[1], capacity, buffer.shape[3])
                setattr(self, name, buffer)
            buffer[:rows, :, new_end - width : new_end] = window

    def move(self, sources: Sequence[int], targets: Sequence[int], start: int, end: int) -> None:
        if sources:
            from_ = torch.tensor(sources, device=self.keys.device)
            into = torch.tensor(targets, device=self.keys.device)
            self.keys[into, :, start:end] = self.keys[from_, :, start:end]
            self.values[into, :, start:end] = self.values[from_, :, start:end]

    def branch(self, source: int, target: int, start: int, into: int, columns: int) -> None:
        for buffer in (self.keys, self.values):
            buffer[target, :, into : into + columns] = buffer[source, :, start : start + columns]

    def wipe(self, rows: Sequence[int], start: int, end: int) -> None:
        """Zero rows that end: one that ended because its numbers were NaN must not leave them for the next one. All
        that a row holds lies within the window."""
        index = torch.tensor(rows, device=self.keys.device)
        self.keys[:, :, start:end].index_fill_(0, index, 0.0)
        self.values[:, :, start:end].index_fill_(0, index, 0.0)
