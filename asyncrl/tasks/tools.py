"""Python functions as tools: what a chat template is told of them, and a call as the function gets it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

import msgspec

from asyncrl.tasks.base import Row, TaskError

Tool = Callable[..., object]

LONGEST_RESULT = 20_000
"""Characters of a tool's result that the model gets to read: more than a context holds of it at once."""


def tools_by_name(tools: object, where: str) -> dict[str, Tool]:
    """The functions of a task's `tools`, by the names that the model calls them by. Raises TaskError."""
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not tools:
        raise TaskError(f"{where}: tools is {tools!r:.80}: give a list of functions, as in tools = [lookup]")
    found: dict[str, Tool] = {}
    for tool in tools:
        name = getattr(tool, "__name__", "")
        if not callable(tool) or not name or inspect.isclass(tool):
            raise TaskError(f"{where}: tools has {tool!r:.80}, which is no function: give functions or bound methods")
        if inspect.iscoroutinefunction(tool):
            raise TaskError(f"{where}: tool {name} is async, and each episode has a process to itself: write `def`")
        if name in found:
            raise TaskError(f"{where}: two tools are named {name}: the model could not tell them apart, rename one")
        found[name] = tool
    return found


def schemas(tools: Mapping[str, Tool], where: str) -> list[dict[str, Any]]:
    """JSON schemas as chat templates take them, made of type hints and docstrings. Imports transformers. Raises
    TaskError for a function that does not say enough."""
    if not tools:
        return []
    from transformers.utils.chat_template_utils import get_json_schema

    found = []
    for name, tool in tools.items():
        try:
            found.append(get_json_schema(tool))
        except Exception as error:  # what is wrong with a signature or a docstring comes in many classes
            raise TaskError(
                f"{where}: nothing can be told of tool {name}: {str(error).strip().splitlines()[0]}\n"
                "Give every argument a type hint, and the function a docstring: what it does, then `Args:` and for "
                "each argument a line such as `key: What it is.`"
            ) from error
    return found


def row_tools(row: Row) -> list[dict[str, Any]]:
    """The schemas in a row's `info["tools"]`, [] without any. Raises TaskError for what no chat template takes."""
    tools = row.info.get("tools")
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and "function" in tool for tool in tools):
        raise TaskError(
            f"row {row.id}: info['tools'] is {tools!r:.100}: give a list of "
            '{"type": "function", "function": {"name": ..., "parameters": ...}}, or what is none another name'
        )
    return tools


def call(tool: Tool, arguments: Mapping[str, Any]) -> str:
    """The result of a call, as text. Raises what the function raises, TypeError for arguments it does not take."""
    inspect.signature(tool).bind(**arguments)
    hints = _hints(tool)
    return as_text(tool(**{name: _converted(name, value, hints.get(name, Any)) for name, value in arguments.items()}))


def as_text(result: object) -> str:
    """What the model reads: a string as it is, anything else as JSON, or as Python writes it if it has no JSON."""
    if not isinstance(result, str):
        try:
            result = json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            result = str(result)
    if len(result) > LONGEST_RESULT:
        return f"{result[:LONGEST_RESULT]}\n[cut: the result has {len(result)} characters]"
    return result


def _hints(tool: Tool) -> dict[str, Any]:
    try:
        return get_type_hints(tool)
    except Exception:  # a name that is only there for type checkers
        return {}


def _converted(name: str, value: object, hint: Any) -> object:
    """The value, if it is of the type the function asks for. Raises TypeError."""
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise TypeError(f"argument {name}: {error}") from None
    except TypeError:  # a type that msgspec does not know: the function sees for itself
        return value
