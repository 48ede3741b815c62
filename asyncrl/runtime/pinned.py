"""What a recipe only names, and a run depends on: made part of the recipe as a run begins.

Every process of a run has its recipe, whenever it starts and wherever: so one that finds something else under the name
says so, instead of asking rows that the others do not.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from asyncrl.config.curricula import with_curricula
from asyncrl.config.curriculum import Curriculum
from asyncrl.config.loading import Loaded
from asyncrl.config.recipe import MixtureTask, Recipe, to_builtins
from asyncrl.tasks.pass_rates import digest, read_pass_rates


def pinned(loaded: Loaded) -> Loaded:
    """The recipe of a run that begins, with the digests of its pass rates where it does not say them itself. Raises
    DataError."""
    task = with_curricula(loaded.recipe.task, _pinned)
    if task is loaded.recipe.task:
        return loaded
    recipe: Recipe = msgspec.structs.replace(loaded.recipe, task=task)
    added = "task.tasks" if isinstance(task, MixtureTask) else "task.curriculum.digest"
    differences = list(dict.fromkeys([*loaded.parent_diff, added]))
    return replace(loaded, recipe=recipe, document=to_builtins(recipe), parent_diff=differences)


def _pinned(curriculum: Curriculum) -> Curriculum:
    if curriculum.digest is not None:
        return curriculum
    found = digest(read_pass_rates(Path(curriculum.pass_rates).expanduser()))
    return msgspec.structs.replace(curriculum, digest=found)
