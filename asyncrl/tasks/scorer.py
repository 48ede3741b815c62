"""A task inside a verifier process. Imports little: a killed process is replaced at the cost of these imports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from asyncrl.config import recipe
from asyncrl.tasks.base import Answer, Row, Task
from asyncrl.tasks.build import construct


def scorer(kind: str, task: dict[str, Any], seed: int) -> TaskScorer:
    """The scores of the recipe's task. `kind` is the name of the recipe's struct that `task` holds."""
    config = msgspec.convert(task, getattr(recipe, kind))
    return TaskScorer(construct(config, seed=seed))


class TaskScorer:
    """A task behind plain dicts (`asyncrl.rewards.worker.Scorer`)."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def score(self, row: dict[str, Any], answer: dict[str, Any]) -> object:
        return self._task.score(Row(**row), Answer(answer["text"], tuple(answer["token_ids"]), answer["finish_reason"]))

    def part_weights(self) -> Mapping[str, float]:
        return self._task.part_weights()
