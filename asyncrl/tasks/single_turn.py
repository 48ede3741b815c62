"""`single-turn`: questions and answers from files, one answer each, scored by the recipe's reward parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, cast, overload

from asyncrl.tasks.base import Answer, Message, Row, Split
from asyncrl.tasks.chat import conversation

if TYPE_CHECKING:
    from asyncrl.config.recipe import SingleTurnTask
    from asyncrl.data.dataset import Dataset
    from asyncrl.data.rows import Record
    from asyncrl.tasks.prompt_length import PromptLimit


class SingleTurn:
    """The task. Files are opened at the first call of `rows`, which a verifier process never makes."""

    name = "single-turn"

    def __init__(self, config: SingleTurnTask, *, key: str = "task", limit: PromptLimit | None = None) -> None:
        """key: of the recipe, that the task stands under. limit: rows with a longer prompt cannot be used; None: they
        are not looked for."""
        self._data, self._limit, self._template_args = config.data, limit, config.chat_template_args
        self._section = f"{key}.data"
        self._system_prompt = config.system_prompt

    def rows(self, split: Split) -> Sequence[Row]:
        """The rows of the split, read when they are asked for; ids are FILE:ROW, or those of `data.id`. Raises
        DataError, also where a row is read."""
        return Rows(self.dataset.train if split == "train" else self.dataset.heldout)

    def messages(self, row: Row) -> list[Message]:
        return conversation(row.prompt, self._system_prompt)

    def score(self, row: Row, answer: Answer) -> Mapping[str, float]:
        """Nothing: what is right, the recipe's verifiers say."""
        return {}

    def part_weights(self) -> Mapping[str, float]:
        return {}

    @cached_property
    def dataset(self) -> Dataset:
        """The files, looked at. Raises DataError."""
        from asyncrl.data.dataset import Dataset  # a verifier process, which reads no rows, does without pyarrow
        from asyncrl.tasks.prompt_length import RowTokens

        tokens = None
        if self._limit is not None and self._limit.longest is not None:
            tokens = RowTokens(
                self._limit, self._limit.longest, row=_row, messages=self.messages, arguments=self._template_args
            )
        return Dataset(self._data, section=self._section, tokens=tokens)


class Rows(Sequence[Row]):
    """Records of files as the rows of a task."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [_row(record) for record in self._records[index]]
        return _row(self._records[index])


def _row(record: Record) -> Row:
    return Row(record.id, cast("str | list[Message]", record.prompt), record.answer, record.info)
