"""Rows of logits that stand for fewer outcomes than the vocabulary has: what sampling left out, probability 0 there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.schema import Support


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Places in a matrix, by column: rows [K] on its device, columns [K] ascending."""

    rows: Tensor
    columns: NDArray[np.int64]

    def within(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """(row, column - start) of those whose column lies in [start, end)."""
        first, last = np.searchsorted(self.columns, (start, end))
        columns = torch.from_numpy(self.columns[first:last] - start)
        return self.rows[first:last], columns.to(self.rows.device)


@dataclass(frozen=True, slots=True)
class Restriction:
    """M rows of logits, one for each hidden state and support that comes up: tokens that were drawn after the same
    prefix from the same ones share a row.

    hidden int64 [M]: which hidden state each row is of; rows int64 [P]: which row each of the tokens is drawn from.
    """

    hidden: Tensor
    rows: Tensor
    _only: Tensor  # bool [M, 1]: rows in which nothing but what is in `_kept` could be drawn
    _kept: _Pairs
    _barred: _Pairs

    @classmethod
    def of(cls, rows: Tensor, support: Support, *, vocabulary: int) -> Restriction:
        """rows int64 [P]: the hidden state that each token was predicted from; support: of these P draws.

        Raises ValueError for an id that is no token of the model."""
        ids = np.where(support.ids < 0, ~support.ids, support.ids)
        if len(ids) and ids.max() >= vocabulary:
            raise ValueError(
                f"a sampling mask of the record has the token {ids.max()}, the model has {vocabulary}: it was made "
                "with another model"
            )
        ends = np.cumsum(support.counts)
        places: dict[tuple[int, bytes], int] = {}
        of = [
            places.setdefault((row, support.ids[end - count : end].tobytes()), len(places))
            for row, count, end in zip(rows.tolist(), support.counts.tolist(), ends.tolist(), strict=True)
        ]
        own = [np.frombuffer(ids, np.int32) for _, ids in places]
        row, ids = (
            np.repeat(np.arange(len(own)), [len(ids) for ids in own]),
            np.concatenate([*own, np.empty(0, np.int32)]),
        )

        def pairs(chosen: NDArray[np.bool_], columns: NDArray[np.int64]) -> _Pairs:
            order = np.argsort(columns, kind="stable")
            return _Pairs(torch.from_numpy(row[chosen][order]).to(rows.device), columns[order])

        kept = ids >= 0
        only = torch.zeros(len(own), 1, dtype=torch.bool)
        only[row[kept]] = True
        return cls(
            hidden=torch.tensor([row for row, _ in places], dtype=torch.int64, device=rows.device),
            rows=torch.tensor(of, dtype=torch.int64, device=rows.device),
            _only=only.to(rows.device),
            _kept=pairs(kept, ids[kept].astype(np.int64)),
            _barred=pairs(~kept, ~ids[~kept].astype(np.int64)),
        )

    def apply_(self, logits: Tensor, start: int = 0) -> Tensor:
        """Put -inf where a row could not have drawn, in place. logits [M, n]: columns [start, start + n)."""
        end = start + logits.shape[1]
        kept = self._kept.within(start, end)
        values = logits[kept]
        logits.masked_fill_(self._only, -torch.inf)
        logits[kept] = values
        logits[self._barred.within(start, end)] = -torch.inf
        return logits
