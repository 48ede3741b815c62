"""The rows of a recipe's files, looked at with the model's tokenizer: `python -m asyncrl.runtime.data_look FOUND <
request.json`. See `data_report`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asyncrl.config.convert import convert
from asyncrl.config.recipe import AgentTask, Recipe, SingleTurnTask, tasks_by_key
from asyncrl.data.errors import DataError
from asyncrl.runtime.data_report import Found
from asyncrl.tasks.build import construct
from asyncrl.tasks.prompt_length import PromptLimit
from asyncrl.tasks.single_turn import SingleTurn


def main() -> None:
    """Write what was found, or the error, to the file that is named; whole or not at all."""
    request = json.load(sys.stdin)
    answer = Path(sys.argv[1])
    document: dict[str, Any]
    try:
        recipe = convert(request["recipe"])
        limit = _limit(recipe, request["folder"])
        document = {"found": {key: asdict(found) for key, found in _found(recipe, limit).items()}}
    except DataError as error:
        document = {"error": str(error)}
    part = answer.with_name("part")
    part.write_text(json.dumps(document))
    part.rename(answer)
    sys.stderr.flush()
    os._exit(0)  # threads of the tokenizer's are not waited for


def _limit(recipe: Recipe, folder: str | None) -> PromptLimit:
    """Of the model in `folder`, or of the built-in one that is not made yet."""
    if folder is not None:
        trust = recipe.model.trust_remote_code
        return PromptLimit.load(Path(folder), given=recipe.model.max_length, trust_remote_code=trust)
    from asyncrl.learners.tiny import MAX_LENGTH
    from asyncrl.learners.tiny_tokenizer import build_tokenizer

    return PromptLimit.of(build_tokenizer(MAX_LENGTH), own=MAX_LENGTH, given=recipe.model.max_length)


def _found(recipe: Recipe, limit: PromptLimit) -> dict[str, Found]:
    found = {}
    for key, config in tasks_by_key(recipe.task).items():
        if isinstance(config, SingleTurnTask | AgentTask):
            task = construct(config, seed=0, key=key, limit=limit)
            assert isinstance(task, SingleTurn)
            found[f"{key}.data"] = Found.of(task.dataset)
    return found


if __name__ == "__main__":
    main()
