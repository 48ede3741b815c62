"""What the recipe's data files came to: said before a run, and kept in its folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

from asyncrl.config.recipe import AgentTask, Recipe, SingleTurnTask, tasks_by_key
from asyncrl.data.dataset import Dataset

DOCUMENT = "data.json"
"""In the run folder."""


def datasets(recipe: Recipe) -> dict[str, Dataset]:
    """The data of each task that reads files, by key of the recipe; {} without such a task. Raises DataError."""
    return {
        f"{key}.data": Dataset(task.data, section=f"{key}.data")
        for key, task in tasks_by_key(recipe.task).items()
        if isinstance(task, SingleTurnTask | AgentTask)
    }


def write(found: dict[str, Dataset], folder: Path) -> None:
    """Keep in the run folder what was found. Raises OSError."""
    document = {key: dataset.document() for key, dataset in found.items()}
    (folder / DOCUMENT).write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
