"""What the answer to a trained row should have been. The record of a trajectory does not have it: it is looked up in
the rows of the run's own recipe, where these are on this host and what they were."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from asyncrl.config.loading import recipe_from_document
from asyncrl.config.packages import VerifiersTask
from asyncrl.config.recipe import AgentTask, CustomTask, Recipe, SingleTurnTask, tasks_by_key
from asyncrl.config.yaml_text import parse
from asyncrl.runtime import data_report
from asyncrl.tasks.base import Row, Task
from asyncrl.tasks.build import construct
from asyncrl.tasks.mixture import Mixture, mixed_row
from asyncrl.tasks.training import train_rows

MOST_ROWS = 100_000
"""Rows that are searched for an id where a ticket has another row than it would have without the model's limit: reading
them takes seconds."""

Lookup = Callable[[int, str], tuple[Any, str]]
"""Ticket and row id -> what is expected, and ""; or None, and why it is not known."""


def lookup(folder: Path) -> Lookup:
    """Of the run in `folder`. The rows are opened at the first question; nothing is raised. A task of the user's own is
    not asked, as looking at a run must run no code that lies beside it."""

    @cache
    def rows() -> _Rows | str:
        try:
            recipe = recipe_from_document(parse((folder / "recipe.yaml").read_text(encoding="utf-8")))
            return _rows(recipe, folder)
        except Exception as error:  # a package's tasks raise what they like, and answers can be read without this
            return _line(error)

    def expected(ticket: int, row_id: str) -> tuple[Any, str]:
        if isinstance(found := rows(), str):
            return None, found
        try:
            row = found.find(ticket, row_id)
        except Exception as error:
            return None, _line(error)
        return (None, f"the recipe's task has no row {row_id} now") if row is None else (row.answer, "")

    return expected


class _Rows:
    """Train rows by ticket, as the run took them, else by id."""

    def __init__(self, task: Task, row_of: Callable[[int], Row]) -> None:
        self._task, self._row_of = task, row_of
        self._by_id: dict[str, Row] | None = None

    def find(self, ticket: int, row_id: str) -> Row | None:
        row = self._row_of(ticket)
        if row.id == row_id:
            return row
        # Rows that are too long for the model were left out, which only its tokenizer tells.
        if self._by_id is None:
            self._by_id = {row.id: row for row in _first_rows(self._task)}
        return self._by_id.get(row_id)


def _first_rows(task: Task) -> list[Row]:
    if isinstance(task, Mixture):
        return [mixed_row(name, row) for name, one in task.tasks.items() for row in _first_rows(one)]
    rows = task.rows("train")
    return [rows[n] for n in range(min(len(rows), MOST_ROWS))]


def _rows(recipe: Recipe, folder: Path) -> _Rows | str:
    """The rows, or why they are not asked. Raises what opening them raises."""
    configs = tasks_by_key(recipe.task)
    for key, config in configs.items():
        if isinstance(config, CustomTask | VerifiersTask):
            return f"{key}.type {config.type} is code, which is not run to look at answers"
    task = construct(recipe.task, seed=recipe.run.seed)
    began = _read(folder / data_report.DOCUMENT)
    tasks = list(task.tasks.values()) if isinstance(task, Mixture) else [task]
    for (key, config), one in zip(configs.items(), tasks, strict=True):
        if isinstance(config, SingleTurnTask | AgentTask):
            said = _changed(one.dataset.document(), began.get(f"{key}.data", {}), folder)  # type: ignore[attr-defined]
            if said:
                return said
    return _Rows(task, train_rows(task, recipe.task, seed=recipe.run.seed))


def _changed(now: Mapping[str, Any], began: Mapping[str, Any], folder: Path) -> str:
    """In what the files of train rows are others than when the run began; "" if in nothing that can be seen. The digest
    says nothing of answers, so a file that was written since then is not believed."""
    read = now["read"]["train"]
    if began.get("read", {}).get("train", {}).get("digest") != read["digest"]:
        return f"its data is other than the run began with, by {folder / data_report.DOCUMENT}"
    start = (folder / "recipe.yaml").stat().st_mtime
    for file in read["files"]:
        path = Path(file["path"])
        if path.exists() and path.stat().st_mtime > start:
            return f"{path} was written after the run began"
    return ""


def _line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    return found
