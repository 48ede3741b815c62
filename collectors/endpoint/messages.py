"""Messages as clients send them: what they mean, and what a chat template is given of them. Pure.

A client sends a conversation back in its own way: it writes arguments anew, drops what is null, makes a list of parts
of a text. Two messages that mean the same are the same, so that what the policy wrote is found again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from asyncrl.collectors.endpoint.asked import Incoming, Part
from asyncrl.collectors.endpoint.errors import ApiError
from asyncrl.tasks.base import Message


class Meaning(NamedTuple):
    """What a message says. calls: name and arguments of each, these as canonical JSON. Ids of calls are a client's way
    to keep them apart, and say nothing."""

    role: str
    content: str
    calls: tuple[tuple[str, str], ...] = ()
    name: str = ""


def meaning(message: Incoming) -> Meaning:
    """Raises ApiError (400) for content that is no text."""
    return Meaning(
        _role(message),
        _text(message.content),
        tuple((call.function.name, canonical(call.function.arguments)) for call in message.tool_calls or ()),
        message.name or "",
    )


def canonical(arguments: str) -> str:
    """JSON that is equal for equal arguments; a text that is no JSON stands for itself.

    >>> canonical('{"b": 1,  "a": "\\\\u00e9"}') == canonical('{"a":"é","b":1}'), canonical("{")
    (True, '{')
    """
    try:
        return json.dumps(json.loads(arguments), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments


def for_template(message: Incoming) -> Message:
    """As chat templates take it: arguments are objects, a developer is a system."""
    made: Message = {"role": _role(message), "content": _text(message.content)}
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _object(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        made["tool_call_id"] = message.tool_call_id
    if message.name:
        made["name"] = message.name
    return made


def _role(message: Incoming) -> str:
    return "system" if message.role == "developer" else message.role


def _text(content: str | Sequence[Part] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in ("text", "refusal"):
            raise ApiError(
                400, f"a message has a part of type {part.type}: only text can be read here", param="messages"
            )
    return "".join(part.text or "" for part in content)


def _object(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
