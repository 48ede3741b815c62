"""Rules of a mixture of tasks, and of how any task shows its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.config.errors import RecipeError, quoted
from asyncrl.config.recipe import MixtureTask, mixed_name
from asyncrl.config.reward_checks import NAME
from asyncrl.config.rewards import Role, declared

GIVEN_TO_TEMPLATES = (
    *("messages", "conversation", "tools", "documents", "chat_template"),
    *("add_generation_prompt", "continue_final_message", "tokenize", "tokenizer_kwargs"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
)
"""What of `apply_chat_template` is decided here: of messages ids are made, whole and with the mark of the answer."""


def check_mixture(task: MixtureTask) -> None:
    """Raise RecipeError for tasks that cannot be mixed."""
    if len(task.tasks) < 2:
        raise RecipeError(
            f"task.tasks has {len(task.tasks)} of the tasks to mix; name two or more, or write it as task"
        )
    names = [mixed_name(mixed) for mixed in task.tasks]
    for n, name in enumerate(names):
        if not NAME.fullmatch(name):
            raise RecipeError(
                f"task.tasks[{n}].name is {quoted(name)}, which is part of row ids and metrics. Use letters, digits, "
                "_, . and -"
            )
        if names.index(name) < n:
            raise RecipeError(
                f"task.tasks[{n}] and task.tasks[{names.index(name)}] are both called {name}; give one a `name` of its "
                "own"
            )
    roles: dict[str, Role] = {}
    for n, mixed in enumerate(task.tasks):
        for name, number in declared(mixed.task.rewards).items():
            if roles.setdefault(name, number.role) != number.role:
                raise RecipeError(
                    f"task.tasks[{n}].task.rewards has {name} as {number.role}, and another task of the mixture as "
                    f"{roles[name]}; metrics tell parts apart by name. Give one a `name` of its own"
                )


def check_template_args(key: str, arguments: Mapping[str, Any]) -> None:
    """Raise RecipeError for arguments that a chat template does not get from a recipe. `key`: of what has them."""
    if taken := [name for name in GIVEN_TO_TEMPLATES if name in arguments]:
        raise RecipeError(
            f"{key}.chat_template_args has {taken[0]}, which is given to it in any case. Name variables of the model's "
            "template, such as {enable_thinking: false}"
        )
