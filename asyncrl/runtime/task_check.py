"""Building a task of other people's code in a process of its own: `python -m asyncrl.runtime.task_check < task.json`.

Its modules may load anything, keep threads running or end their process; the process that only watches a run must not.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from asyncrl.config.packages import ReasoningGymTask, VerifiersTask
from asyncrl.config.recipe import AgentTask, CustomTask, Recipe, Task, tasks_by_key, to_builtins
from asyncrl.runtime.apart import run_apart
from asyncrl.tasks.base import NotInstalled, TaskError

LIMIT_S = 120.0
"""For importing whatever the module imports and looking at its rows."""

BUILT = 10
"""Exit code of a task that was built: not 0, with which its module may end the process in the middle."""

CONVERSES = 12
"""As BUILT, of a task whose episodes may have several answers."""

WRONG = 11
"""Exit code of a task that cannot be used; its message is the last thing on stderr, after MARK."""

LACKING = 13
"""As WRONG, of a task whose package is not on this machine."""

MARK = "\0task error\0"


def others_code(task: Task) -> bool:
    """Whether it is checked here: the user's own, one of a package, or a mixture with such a one."""
    foreign = (AgentTask, CustomTask, ReasoningGymTask, VerifiersTask)
    return any(isinstance(one, foreign) for one in tasks_by_key(task).values())


async def check_apart(recipe: Recipe, *, model_path: Path | None = None) -> bool:
    """Whether episodes of the recipe's task may have several answers. Raises TaskError if it cannot be built here, in
    the words `build_task` has for it, or if the chat template in `model_path` cannot show what its tools give back."""
    task = recipe.task
    request = {
        "task": to_builtins(task),
        "seed": recipe.run.seed,
        "max_turns": recipe.collector.max_turns,
        "model_path": None if model_path is None else str(model_path),
        "trust_remote_code": recipe.model.trust_remote_code,
    }
    try:
        ended = await run_apart(__name__, request, limit_s=LIMIT_S)
    except TimeoutError:
        raise TaskError(f"task.type {task.type}: it was not built within {LIMIT_S:.0f} s") from None
    if ended.code in (WRONG, LACKING):
        message = ended.said.rpartition(MARK)[2].strip()
        raise TaskError(message) if ended.code == WRONG else NotInstalled(message)
    if ended.code not in (BUILT, CONVERSES):
        raise TaskError(f"task.type {task.type}: building it ended its process with code {ended.code}: {ended.last}")
    return ended.code == CONVERSES


def main() -> None:
    """Build the task that standard input describes."""
    from asyncrl.config.convert import convert
    from asyncrl.data.errors import DataError
    from asyncrl.tasks.agent import check_agent
    from asyncrl.tasks.build import build_task
    from asyncrl.tasks.conversing import check_template_turns, check_turns, converses
    from asyncrl.tasks.training import train_rows

    request = json.load(sys.stdin)
    config = convert({"task": request["task"]}).task
    try:
        task = build_task(config, seed=request["seed"])
        train_rows(task, config, seed=request["seed"])
        check_turns(task, max_turns=request["max_turns"])
        for one in tasks_by_key(config).values():
            if isinstance(one, AgentTask):
                check_agent(one)
        if request["model_path"] is not None:
            from transformers import AutoTokenizer

            trust = request["trust_remote_code"]
            tokenizer = AutoTokenizer.from_pretrained(request["model_path"], trust_remote_code=trust)
            check_template_turns(task, config, tokenizer)
        code = CONVERSES if converses(task) else BUILT
    except (TaskError, DataError) as error:
        sys.stderr.write(f"{MARK}{error}")
        code = LACKING if isinstance(error, NotInstalled) else WRONG
    sys.stderr.flush()
    os._exit(code)  # threads of the task's are not waited for


if __name__ == "__main__":
    main()
