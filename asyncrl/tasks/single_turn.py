"""`single-turn`: questions and answers from JSONL files, one answer each, scored by the recipe's reward parts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

from asyncrl.data.jsonl import Record, read_jsonl, shared_prompts, split_heldout
from asyncrl.tasks.base import Answer, Message, Row, Split
from asyncrl.tasks.chat import conversation

if TYPE_CHECKING:
    from asyncrl.config.recipe import SingleTurnTask

logger = logging.getLogger(__name__)


class SingleTurn:
    """The task. Files are read at the first call of `rows`, which a verifier process never makes."""

    name = "single-turn"

    def __init__(self, config: SingleTurnTask) -> None:
        self._data = config.data
        self._system_prompt = config.system_prompt

    def rows(self, split: Split) -> Sequence[Row]:
        """All rows of the split; ids are FILE:LINE. Raises DataError."""
        return self._splits[split]

    def messages(self, row: Row) -> list[Message]:
        return conversation(row.prompt, self._system_prompt)

    def score(self, row: Row, answer: Answer) -> Mapping[str, float]:
        """Nothing: what is right, the recipe's verifiers say."""
        return {}

    def part_weights(self) -> Mapping[str, float]:
        return {}

    @cached_property
    def _splits(self) -> dict[Split, list[Row]]:
        train_file = Path(self._data.train)
        train = self._read(train_file)
        if self._data.heldout is None:
            train, heldout = split_heldout(train)
            return {"train": _rows(train_file, train), "heldout": _rows(train_file, heldout)}
        heldout_file = Path(self._data.heldout)
        heldout = self._read(heldout_file)
        if shared := shared_prompts(train, heldout):
            logger.warning(
                "%d held-out prompts of %s also occur in %s: held-out success will look too good",
                *(shared, heldout_file, train_file),
            )
        return {"train": _rows(train_file, train), "heldout": _rows(heldout_file, heldout)}

    def _read(self, path: Path) -> list[Record]:
        return read_jsonl(path, prompt=self._data.prompt, answer=self._data.answer)


def _rows(file: Path, records: Sequence[Record]) -> list[Row]:
    return [
        Row(f"{file.name}:{record.row}", cast("str | list[Message]", record.prompt), record.answer, record.info)
        for record in records
    ]
