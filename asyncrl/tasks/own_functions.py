"""The functions of the user's that verifiers call: whether they are there, and can be called as they will be."""

from __future__ import annotations

import inspect
from typing import Any

from asyncrl.config.rewards import Function, Part, ToolCall
from asyncrl.tasks.base import TaskError
from asyncrl.tasks.modules import load


def check_functions(part: Part, key: str) -> None:
    """Raise TaskError for a function that the part names and that could not be called for any answer. Imports them.

    key: of the part in the recipe, such as `task.rewards[0]`.
    """
    if isinstance(part, Function):
        _check(f"{key}.function", part.function, ("row", "answer"))
    elif isinstance(part, ToolCall):
        for n, tool in enumerate(part.tools):
            if tool.function:  # its arguments are those of a schema, which each row has for itself
                load(f"{key}.tools[{n}].function", tool.function, "function")
            if tool.safe:
                _check(f"{key}.tools[{n}].safe", tool.safe, ("arguments",))


def _check(key: str, name: str, takes: tuple[str, ...]) -> None:
    function: Any = load(key, name, "function")
    write = f"write `def {name.rpartition(':')[2]}({', '.join(takes)})`"
    if inspect.iscoroutinefunction(function):
        raise TaskError(f"{key} {name} is async, and each call has a process to itself: {write}")
    try:
        inspect.signature(function).bind(*takes)
    except TypeError as error:
        raise TaskError(f"{key} {name} cannot be called with ({', '.join(takes)}), {error}: {write}") from None
    except ValueError:  # some functions written in C do not tell
        pass
