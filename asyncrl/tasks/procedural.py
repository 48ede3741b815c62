"""Rows that are made when they are asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import overload

from asyncrl.tasks.base import Row


class ProceduralRows(Sequence[Row]):
    """The rows of a split as a sequence of `size`, of which nothing is kept: `row` makes one."""

    def __init__(self, size: int) -> None:
        self._size = size

    @abstractmethod
    def row(self, position: int) -> Row:
        """The row at 0 <= position < len(self), the same one every time and in every process."""

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self.row(position) for position in range(*index.indices(self._size))]
        position = index + self._size if index < 0 else index
        if not 0 <= position < self._size:
            raise IndexError(f"row {index} of {self._size}")
        return self.row(position)
