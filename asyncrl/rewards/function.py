"""The reward part `function`: one of the user's, which looks at a row and an answer."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, SupportsFloat

from asyncrl.config.rewards import Function, part_name
from asyncrl.rewards.base import Finding
from asyncrl.rewards.parts import judge


class FunctionPart:
    """`score(row, answer)`, whose arguments have the fields of `tasks.base.Row` and `Answer`. It returns a number, or a
    `Finding` with one part, which names what is wrong. A Verifier. Raises what importing the module raises."""

    def __init__(self, part: Function) -> None:
        self._score = imported(part.function)
        self._name = part_name(part)
        self._function = part.function
        self._violation = part.role == "violation"

    def check(self, row: Mapping[str, Any]) -> None:
        """What it needs of a row, only it knows."""

    def verify(self, row: Mapping[str, Any], answer: Mapping[str, Any]) -> Finding:
        returned = self._score(SimpleNamespace(**row), SimpleNamespace(**answer))
        said = returned if isinstance(returned, Finding) else Finding({self._name: _number(returned, self._function)})
        if len(said.parts) != 1:
            raise ValueError(
                f"{self._function} returned the parts {', '.join(said.parts) or 'none'}: a function in task.rewards "
                "makes one number. List several functions, or write a task whose score has several parts"
            )
        (value,) = said.parts.values()
        if self._violation and isinstance(value, SupportsFloat) and float(value) > 0:
            raise ValueError(  # it would be a reward for what must not happen
                f"{self._function} returned {value!r:.100}, and its role is violation: return a number below 0 where "
                "it happened, and 0 where it did not"
            )
        return Finding({self._name: value}, said.wrong, said.detail, said.read)


def imported(name: str) -> Callable[..., Any]:
    """The function "module:function". Raises what importing the module raises."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _number(returned: object, function: str) -> float | None:
    """One number, or None for no score. Raises ValueError for anything else."""
    if returned is None:
        return None
    verdict = judge({"reward": returned})
    if verdict.failure == "verifier_invalid":
        raise ValueError(f"{function} returned {returned!r:.100}: return one number, or a Finding with one part")
    return returned  # type: ignore[return-value]  # has __float__; `judge` looks at it once more
