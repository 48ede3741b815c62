"""The curricula of a recipe's task, or of all tasks of a mixture."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from asyncrl.config.curriculum import Curriculum
from asyncrl.config.recipe import MixtureTask, SingleTask, Task


def with_curricula(task: Task, change: Callable[[Curriculum], Curriculum | None]) -> Task:
    """The task with what `change` makes of each curriculum. Where there is none it is the very same task.

    >>> from asyncrl.config.recipe import ReverseTask
    >>> with_curricula(ReverseTask(curriculum=Curriculum(pass_rates="a.json")), lambda _: None) == ReverseTask()
    True
    """
    if not isinstance(task, MixtureTask):
        return _changed(task, change)
    own = [_changed(mixed.task, change) for mixed in task.tasks]
    if all(one is mixed.task for one, mixed in zip(own, task.tasks, strict=True)):
        return task
    both = zip(task.tasks, own, strict=True)
    return msgspec.structs.replace(task, tasks=[msgspec.structs.replace(mixed, task=one) for mixed, one in both])


def _changed(task: SingleTask, change: Callable[[Curriculum], Curriculum | None]) -> SingleTask:
    if task.curriculum is None or (changed := change(task.curriculum)) is task.curriculum:
        return task
    return msgspec.structs.replace(task, curriculum=changed)
