"""The reward part `tool-call`: the answer is the call that the row expects, and making it is safe.

An answer is looked at in this order, and what is wrong first is its class:

| class              | the answer                                                      | earns                      |
|--------------------|-----------------------------------------------------------------|----------------------------|
| `malformed`        | is not one call in strict JSON, or was cut off                  | `malformed` -1             |
| `unsafe`           | is a call that the tool's policy forbids, which is not executed | `tool`, if it is the right |
| `wrong_tool`       | calls another tool, or one that there is none of                | nothing                    |
| `wrong_arguments`  | has arguments that the schema forbids, or others than expected  | `tool`, `execution`        |
| `timeout`          | is right, and the tool took longer than `call_timeout_s`        | `tool`, `arguments`        |
| `execution_failed` | is right, and the tool raised                                   | `tool`, `arguments`        |

Only the right tool is executed, so that a harmless call of another one earns nothing. Arguments that the schema forbids
are not tried either.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.config.rewards import ToolCall as ToolCallPart
from asyncrl.config.rewards import numbers
from asyncrl.rewards.base import BadRow, Finding
from asyncrl.rewards.function import imported
from asyncrl.rewards.strict_json import strict_json
from asyncrl.rewards.time_limit import Late, limit
from asyncrl.rewards.tool_call_schema import Tool, tools_of
from asyncrl.rewards.tool_call_text import Malformed, ToolCall, call_of, only_call

MALFORMED = "malformed"
UNSAFE = "unsafe"
WRONG_TOOL = "wrong_tool"
WRONG_ARGUMENTS = "wrong_arguments"
TIMEOUT = "timeout"
EXECUTION_FAILED = "execution_failed"


class ToolCallVerifier:
    """A Verifier of four numbers: `tool`, `arguments` and `execution` are 0 or 1, `malformed` is 0 or -1. Raises what
    importing the policy's functions raises."""

    def __init__(self, part: ToolCallPart) -> None:
        self._part = part
        self._names = tuple(numbers(part))
        self._functions = {tool.name: imported(tool.function) for tool in part.tools if tool.function}
        self._safe = {tool.name: imported(tool.safe) for tool in part.tools if tool.safe}

    def check(self, row: Mapping[str, Any]) -> None:
        expected, tool = self._expected(row)
        if complaint := _complaint(row, tool, expected):
            raise BadRow(f"row {row['id']}: the expected call's arguments: {complaint}")
        if not self._is_safe(expected):
            raise BadRow(f"row {row['id']}: the policy forbids the expected call {_written(expected)}")

    def remark(self, rows: Sequence[Mapping[str, Any]]) -> str:
        shown = sorted({name for row in rows for name in tools_of(row)})
        unshown = [tool.name for tool in self._part.tools if tool.name not in shown]
        if not unshown or not shown:
            return ""
        close = difflib.get_close_matches(unshown[0], shown, n=1)
        meant = f"did you mean {close[0]!r}?" if close else f"theirs are {', '.join(shown)}."
        return (
            f"none of the first {len(rows)} rows has a tool {', '.join(map(repr, unshown))}, so what the recipe says "
            f"of it is of no effect there; {meant} A call of a tool with no `safe` of its own is always let through"
        )

    def verify(self, row: Mapping[str, Any], answer: Mapping[str, Any]) -> Finding:
        expected, tool = self._expected(row)
        part = self._part
        try:
            if answer["finish_reason"] != "stop":
                raise Malformed("cut off")
            call = only_call(answer["text"], tool_format=part.tool_format, fences=part.fences)
        except Malformed as error:
            return self._finding(MALFORMED, str(error), malformed=True)
        right_tool = call.name == expected.name
        called = tools_of(row).get(call.name)
        if called is None:
            return self._finding(WRONG_TOOL, f"there is no tool {call.name}", call)
        complaint = _complaint(row, called, call)
        if not complaint and not self._is_safe(call):
            return self._finding(UNSAFE, "not executed", call, tool=right_tool)
        if not right_tool:
            return self._finding(WRONG_TOOL, f"not {_written(expected)}", call)
        if complaint:
            return self._finding(WRONG_ARGUMENTS, complaint, call, tool=True)
        right = tool.same(call.arguments, expected.arguments)
        failed, detail = self._execute(call)
        wrong = failed
        if not right:
            wrong, detail = WRONG_ARGUMENTS, f"not {_written(expected)}"
        return self._finding(wrong, detail, call, tool=True, arguments=right, execution=not failed)

    def _expected(self, row: Mapping[str, Any]) -> tuple[ToolCall, Tool]:
        """The call that is right, and its tool. Raises BadRow."""
        tools, answer = tools_of(row), row["answer"]
        try:
            call = call_of(strict_json(answer) if isinstance(answer, str) else answer)
        except (ValueError, RecursionError) as error:
            raise BadRow(f"row {row['id']}: the expected answer {answer!r:.80} is no tool call: {error}") from None
        if call.name not in tools:
            raise BadRow(f"row {row['id']}: the expected call is one of {call.name}; its tools are {', '.join(tools)}")
        return call, tools[call.name]

    def _is_safe(self, call: ToolCall) -> bool:
        if call.name not in self._safe:
            return True
        said = self._safe[call.name](copy.deepcopy(call.arguments))  # what it does to them, it does to its own
        if said is None:  # a `return` was forgotten: neither allowed nor forbidden
            raise ValueError(f"the policy of {call.name} returned None: return True or False")
        return bool(said)

    def _execute(self, call: ToolCall) -> tuple[str, str]:
        """Make the call, if there is a function for it. The class of what went wrong, "" if nothing did, and why."""
        function = self._functions.get(call.name)
        if function is None:
            return "", ""
        try:
            with limit(self._part.call_timeout_s):
                function(**copy.deepcopy(call.arguments))
        except Late:
            return TIMEOUT, f"{call.name} took longer than call_timeout_s = {self._part.call_timeout_s:g} s"
        except MemoryError:
            raise  # the process has a limit of memory: see `worker.py`
        except (Exception, SystemExit) as error:
            return EXECUTION_FAILED, f"{call.name} raised {type(error).__name__}: {error}"
        return "", ""

    def _finding(
        self,
        wrong: str,
        detail: str,
        call: ToolCall | None = None,
        *,
        tool: bool = False,
        arguments: bool = False,
        execution: bool = False,
        malformed: bool = False,
    ) -> Finding:
        values = (float(tool), float(arguments), float(execution), -1.0 if malformed else 0.0)
        read = "" if call is None else _written(call)
        return Finding(dict(zip(self._names, values, strict=True)), wrong, detail, read)


def _complaint(row: Mapping[str, Any], tool: Tool, call: ToolCall) -> str:
    try:
        return tool.complaint(call.arguments)
    except ValueError as error:
        raise BadRow(f"row {row['id']}: {error}") from None


def _written(call: ToolCall) -> str:
    """The call as one text, the same for all that mean the same."""
    return json.dumps({"name": call.name, "arguments": call.arguments}, sort_keys=True)
