"""What the recipe's data files came to: said before a run, and kept in its folder."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config.recipe import AgentTask, Recipe, SimulatedEngine, SingleTurnTask, tasks_by_key, to_builtins
from asyncrl.data.dataset import Dataset
from asyncrl.data.errors import DataError
from asyncrl.runtime import models
from asyncrl.runtime.apart import run_apart
from asyncrl.tasks.base import TaskError

logger = logging.getLogger(__name__)

DOCUMENT = "data.json"
"""In the run folder."""

LIMIT_S = 1800.0
"""For loading the tokenizer, and for what `data.examined` and `data.lengths` look at, another process's turn first."""

NOT_COUNTED = "tokens of prompts: not counted, the model is not on this machine"


@dataclass(frozen=True, slots=True)
class Found:
    """What one data section came to: `line` for a person, `document` (JSON) for the run folder."""

    line: str
    document: Mapping[str, Any]

    @classmethod
    def of(cls, dataset: Dataset) -> Found:
        return cls(dataset.line(), dataset.document())


async def look(recipe: Recipe) -> dict[str, Found]:
    """What the data of each task that reads files came to, by key of the recipe, with rows that are too long for the
    model left out, as its collectors leave them out; {} without such a task. Warnings are logged.

    A tokenizer may run code that comes with the model, and loads torch: it is used in a process of its own. Where it is
    not on this machine, or the engine is simulated and reads no prompt, tokens are not counted. Raises DataError,
    TaskError.
    """
    tasks = {
        key: task for key, task in tasks_by_key(recipe.task).items() if isinstance(task, SingleTurnTask | AgentTask)
    }
    if not tasks:
        return {}
    reads = not isinstance(recipe.collector.engine, SimulatedEngine)
    folder = models.here(recipe) if reads else None
    if folder is not None or (reads and recipe.model.path == models.BUILTIN_TINY):
        found = await _apart(recipe, folder)
    else:
        found = {f"{key}.data": Found.of(Dataset(task.data, section=f"{key}.data")) for key, task in tasks.items()}
        if reads:
            found = {key: Found(f"{one.line}; {NOT_COUNTED}", one.document) for key, one in found.items()}
    for one in found.values():
        for warning in one.document["warnings"]:
            logger.warning("%s", warning)
    return found


def write(found: Mapping[str, Found], folder: Path) -> None:
    """Keep in the run folder what was found, if there is anything. Raises OSError, and DataError where the folder's run
    began with other rows."""
    if found:
        document = {key: one.document for key, one in found.items()}
        path = folder / DOCUMENT
        if path.exists():
            _compare(json.loads(path.read_bytes()), document, path)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


def _compare(began: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> None:
    """Raise DataError if what is asked has changed. A run of an older version kept no digests."""
    for key, document in now.items():
        for side, read in document["read"].items():
            before = began.get(key, {}).get("read", {}).get(side, {})
            if before.get("digest", read["digest"]) != read["digest"]:
                rows, rows_before = (sum(file["rows"] for file in one["files"]) for one in (read, before))
                raise DataError(
                    f"{key}.{side} has other prompts than the run began with: {rows:,} rows now, {rows_before:,} then "
                    f"({path}).\n"
                    "It would ask other rows from here on. Put back the files as they were, or begin a new run."
                )


async def _apart(recipe: Recipe, folder: Path | None) -> dict[str, Found]:
    """In another process (`data_look`). folder: of the model; None: it is built in, and not made yet."""
    request = {
        "recipe": {name: section for name, section in to_builtins(recipe).items() if name in ("task", "model")},
        "folder": None if folder is None else str(folder),
    }
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "found"
        try:
            ended = await run_apart("asyncrl.runtime.data_look", request, limit_s=LIMIT_S, arguments=[str(answer)])
        except TimeoutError:
            raise DataError(f"task.data: it was not looked through within {LIMIT_S:.0f} s") from None
        if not answer.is_file():
            raise TaskError(
                f"task.data: looking at its rows with the tokenizer of model.path {recipe.model.path} ended with code "
                f"{ended.code}: {ended.last}"
            )
        document = json.loads(answer.read_bytes())
    if error := document.get("error"):
        raise DataError(error)
    return {key: Found(**one) for key, one in document["found"].items()}
