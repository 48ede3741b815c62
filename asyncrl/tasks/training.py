"""Which train row a ticket gets: a function of its ordinal, the recipe and `run.seed`, so that a run that goes on asks
what it would have asked, and a ticket that is issued again the same."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.config import recipe
from asyncrl.tasks.base import Row, Task
from asyncrl.tasks.build import shuffled
from asyncrl.tasks.curriculum import course_of
from asyncrl.tasks.mixture import Mixture, mixed_row
from asyncrl.tasks.order import row_index
from asyncrl.tasks.shares import Shares

RowOf = Callable[[int], Row]
"""The train row of an ordinal. Raises what the task raises, whose program it is."""


def train_rows(task: Task, config: recipe.Task, *, seed: int) -> RowOf:
    """How train rows are drawn. Tasks of a mixture take turns by weight, and each goes through its own rows as it would
    alone. `task`: as `build_task` makes it of `config`.

    Raises DataError and TaskError for a curriculum that has no use.
    """
    if not isinstance(config, recipe.MixtureTask):
        return _alone(task, config, seed=seed, key="task", name=None)
    assert isinstance(task, Mixture), "which is what a mixture's recipe builds"
    own = [
        _alone(one, mixed.task, seed=seed, key=f"task.tasks[{n}].task", name=name)
        for n, (mixed, (name, one)) in enumerate(zip(config.tasks, task.tasks.items(), strict=True))
    ]
    names, shares = list(task.tasks), Shares([mixed.weight for mixed in config.tasks])

    def row_of(ordinal: int) -> Row:
        which, drawn = shares.deal(ordinal)
        return mixed_row(names[which], own[which](drawn))

    return row_of


def _alone(task: Task, config: recipe.SingleTask, *, seed: int, key: str, name: str | None) -> RowOf:
    shuffle = shuffled(config)
    if config.curriculum is not None:
        course = course_of(config.curriculum, task.rows("train"), seed=seed, shuffle=shuffle, key=key, name=name)
        return lambda ordinal: task.rows("train")[course.index(ordinal, seed=seed, shuffle=shuffle)]

    def row_of(ordinal: int) -> Row:
        rows = task.rows("train")
        return rows[row_index(ordinal, len(rows), seed=seed, shuffle=shuffle)]

    return row_of
