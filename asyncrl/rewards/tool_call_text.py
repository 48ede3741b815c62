"""From an answer's text to the one tool call that it is, or why it is none. Pure.

Strict on purpose: what this takes, whoever makes the calls has to take too, and a reward for text that their parser
refuses teaches the model to write it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from asyncrl.rewards.strict_json import strict_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"  # of hermes
FENCE = "```"
KEYS = {"name", "arguments"}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asked for. Arguments are JSON values."""

    name: str
    arguments: dict[str, Any]


class Malformed(Exception):
    """Why a text is no call. One line."""


def call_of(found: object) -> ToolCall:
    """The call that a JSON value is; `parameters` may stand for `arguments`, as Llama writes it, and no arguments are
    none. Raises ValueError."""
    if not isinstance(found, dict):
        raise ValueError(f"a call is an object with name and arguments, got {found!r:.80}")
    name, arguments = found.get("name"), found.get("arguments", found.get("parameters", {}))
    if not isinstance(name, str) or not name:
        raise ValueError(f"a call needs a name that is a string, got {name!r:.80}")
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments of {name} must be an object, got {arguments!r:.80}")
    return ToolCall(name, arguments)


def only_call(text: str, *, tool_format: Literal["hermes", "json"], fences: Literal["refuse", "strip"]) -> ToolCall:
    """The call of an answer that has to be one. `hermes`: what stands before it is the model's own affair, and nothing
    may follow it. `json`: it is the whole answer. White space around it does not count. Raises Malformed.

    >>> only_call(' {"name": "add", "arguments": {"a": 1}}', tool_format="json", fences="refuse")
    ToolCall(name='add', arguments={'a': 1})
    """
    text = _hermes(text) if tool_format == "hermes" else text.strip()
    if fences == "strip" and text.startswith(FENCE) and text.endswith(FENCE):
        text = text.removeprefix(FENCE).removeprefix("json").removesuffix(FENCE).strip()
    try:
        found = strict_json(text)
        if isinstance(found, dict) and found.keys() != KEYS:
            raise ValueError(f"a call has the keys name and arguments, got {', '.join(found) or 'none'}")
        return call_of(found)
    except (ValueError, RecursionError) as error:
        raise Malformed(str(error)) from None


def _hermes(text: str) -> str:
    _, opened, rest = text.partition(OPEN)
    inside, closed, behind = rest.partition(CLOSE)
    if not opened:
        raise Malformed(f"there is no {OPEN}")
    if not closed:
        raise Malformed(f"{OPEN} without {CLOSE}")
    if behind.strip():
        raise Malformed(f"text behind the call: {behind.strip()!r:.80}")
    return inside.strip()
