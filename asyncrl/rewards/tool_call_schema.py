"""The tools that a row shows, by JSON Schema: whether arguments are any, and whether two mean the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from asyncrl.rewards.base import BadRow

try:
    import jsonschema
    from jsonschema.protocols import Validator
    from jsonschema.validators import validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable
except ImportError as error:
    raise ModuleNotFoundError(
        "the reward part `tool-call` needs jsonschema: pip install 'asyncrl[tool-call]'"
    ) from error

NOTHING_ELSE: Registry[Any] = Registry()
"""Where schemas that a schema names are looked up: jsonschema's own default would fetch them from the network."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool. defaults: of the arguments that may be left out."""

    validator: Validator
    defaults: Mapping[str, Any]

    def complaint(self, arguments: Mapping[str, Any]) -> str:
        """What the schema has against these arguments, "" if nothing. Raises ValueError if it refers to what there is
        not."""
        try:
            error = next(iter(self.validator.iter_errors(arguments)), None)
            return "" if error is None else f"{error.json_path}: {error.message}"
        except RecursionError:
            return "they are nested too deep"
        except Unresolvable as error:
            raise ValueError(f"its tools refer to {error.ref!r}, which is nowhere in them") from None

    def same(self, given: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
        """Whether a call with these would do the same: an argument that is left out is its default."""
        return same({**self.defaults, **given}, {**self.defaults, **expected})


def same(one: object, other: object) -> bool:
    """Whether two JSON values are equal: texts and lists exactly, objects whatever the order of their keys, numbers by
    value, so that 1 is 1.0; but no number is a truth value.

    >>> same({"a": 1, "b": [2]}, {"b": [2.0], "a": 1}), same(1, True)
    (True, False)
    """
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def tools_of(row: Mapping[str, Any]) -> Mapping[str, Tool]:
    """The tools in the row's `info["tools"]`, by name: JSON schemas as chat templates take them. Raises BadRow."""
    tools = row["info"].get("tools")
    if not isinstance(tools, list) or not tools:
        raise BadRow(f"row {row['id']}: its column `tools` is {tools!r:.80}; `tool-call` needs a list of JSON schemas")
    try:
        return _tools(json.dumps(tools))
    except (ValueError, TypeError, RecursionError) as error:
        raise BadRow(f"row {row['id']}: its column `tools`: {_first_line(error)}") from None


@lru_cache(256)  # rows share their tools, and checking a schema takes a hundred times as long as using it
def _tools(listed: str) -> Mapping[str, Tool]:
    found: dict[str, Tool] = {}
    for tool in json.loads(listed):
        described = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(described, dict) or not isinstance(name := described.get("name"), str):
            raise ValueError(
                f'{tool!r:.80} is no tool: write {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}'
            )
        if name in found:
            raise ValueError(f"two tools are called {name}")
        schema = described.get("parameters", {})
        if not isinstance(schema, dict):
            raise ValueError(f"{name}, parameters: {schema!r:.80} is no JSON Schema; for none, leave the key out")
        cls = validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            cls.check_schema(schema)
        except jsonschema.SchemaError as error:  # which of the tools, and where in it
            place = error.json_path.replace("$", "parameters", 1)
            raise ValueError(f"{name}, {place}: {error.instance!r:.80} is no JSON Schema there") from None
        properties = schema.get("properties", {})
        defaults = {key: value["default"] for key, value in properties.items() if _has_default(value)}
        found[name] = Tool(cls(schema, registry=NOTHING_ELSE), defaults)
    return found


def _has_default(schema: object) -> bool:
    """Of one argument's, which may be `true`: anything."""
    return isinstance(schema, dict) and "default" in schema


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
