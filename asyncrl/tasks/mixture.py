"""`mixture`: several tasks in one run. A row's id begins with the name of its task, as in `maths/train.jsonl:7`, and by
that a row finds its conversation, its verifiers and its weights, in whatever process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from asyncrl.rewards.base import Finding
from asyncrl.tasks.base import Answer, Message, Row, Split, Task
from asyncrl.tasks.procedural import ProceduralRows
from asyncrl.tasks.shares import evenly

BETWEEN = "/"
"""Of the name of a task and the row's own id. No such name has one."""


class Mixture:
    """The tasks by name, as one task. What each of them sees is its own row, under its own id."""

    name = "mixture"

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self.tasks = tasks

    def rows(self, split: Split) -> Sequence[Row]:
        """All rows of the split, from each task in turns, for as long as it has any: the first n of them, which an
        evaluation asks, are of all tasks alike. (The order of training is another: `training.py`.)"""
        return _Rows({name: task.rows(split) for name, task in self.tasks.items()})

    def messages(self, row: Row) -> list[Message]:
        return self._task(row).messages(own_row(row))

    def score(self, row: Row, answer: Answer) -> Finding | Mapping[str, float | None] | float:
        return self._task(row).score(own_row(row), answer)

    def part_weights(self) -> Mapping[str, float]:
        """Of each task's own parts, by `name/part`."""
        return together({name: task.part_weights() for name, task in self.tasks.items()})

    def _task(self, row: Row) -> Task:
        return self.tasks[task_of(row.id)]


def mixed_row(name: str, row: Row) -> Row:
    """A row of the task `name`, as a mixture has it."""
    return replace(row, id=f"{name}{BETWEEN}{row.id}")


def own_row(row: Row) -> Row:
    """A row of a mixture as its own task made it."""
    return replace(row, id=own_id(row.id))


def task_of(row_id: str) -> str:
    """The task's name in the id of a mixture's row.

    >>> task_of("maths/train.jsonl:7"), own_id("maths/train.jsonl:7")
    ('maths', 'train.jsonl:7')
    """
    return row_id.partition(BETWEEN)[0]


def own_id(row_id: str) -> str:
    """The id of a mixture's row in its own task."""
    return row_id.partition(BETWEEN)[2]


def together(weights: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Part weights of several tasks in one mapping, by `name/part`."""
    return {f"{name}{BETWEEN}{part}": weight for name, own in weights.items() for part, weight in own.items()}


def weights_of(name: str, weights: Mapping[str, float]) -> dict[str, float]:
    """What `together` has of one task.

    >>> weights_of("maths", {"maths/form": 0.5, "code/form": 1.0})
    {'form': 0.5}
    """
    return {part: weight for key, weight in weights.items() for of, part in [key.split(BETWEEN, 1)] if of == name}


class _Rows(ProceduralRows):
    def __init__(self, rows: Mapping[str, Sequence[Row]]) -> None:
        self._names, self._rows = list(rows), list(rows.values())
        self._sizes = [len(own) for own in self._rows]
        super().__init__(sum(self._sizes))

    def row(self, position: int) -> Row:
        which, place = evenly(position, self._sizes)
        return mixed_row(self._names[which], self._rows[which][place])
