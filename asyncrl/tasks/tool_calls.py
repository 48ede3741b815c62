"""The calls in an answer's text, as a model was taught to write them. Pure.

`hermes` (Qwen, Hermes and others): any text, then one or several of

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

`json`: the whole answer is one such object, or a list of them (`parameters` may stand for `arguments`: Llama).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from asyncrl.rewards.strict_json import strict_json
from asyncrl.rewards.tool_call_text import ToolCall, call_of

ToolFormat = Literal["hermes", "json"]

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """What an answer asks for. content: the text outside of calls, stripped. problem: why something that looks like a
    call is none; "" if all is well. Calls before the faulty one are kept, it and what follows are not."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    problem: str = ""
    faulty: str = field(default="", repr=False)  # the text of the faulty one


def tool_calls(text: str, form: ToolFormat = "hermes") -> ToolCalls:
    """The calls of an answer.

    >>> tool_calls('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ToolCalls(content='Let me see.', calls=(ToolCall(name='add', arguments={'a': 1}),), problem='')
    >>> tool_calls('<tool_call>{"name": 3}</tool_call>').problem
    'a call needs a name that is a string, got 3'
    """
    if form == "json":
        stripped = text.strip()
        return _read([stripped], "") if stripped[:1] in ("{", "[") else ToolCalls(stripped)
    blocks = [match[1].strip() for match in _HERMES.finditer(text)]
    return _read(blocks, _HERMES.sub("", text).strip())


def _read(blocks: Sequence[str], content: str) -> ToolCalls:
    calls: list[ToolCall] = []
    for block in blocks:
        try:
            found = strict_json(block)
            calls += [call_of(one) for one in (found if isinstance(found, list) else [found])]
        except (ValueError, RecursionError) as error:
            return ToolCalls(content, tuple(calls), str(error) or type(error).__name__, block)
    return ToolCalls(content, tuple(calls))
