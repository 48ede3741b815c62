"""From the tests of a row to what is run. Pure.

| a row has                           | each test is                                                                  |
|-------------------------------------|-------------------------------------------------------------------------------|
| `[{"stdin", "stdout"}, ...]`        | a run of the program with that input; its output is compared                  |
| `[{"call", "expected"}, ...]`       | an expression, such as `add(1, 2)`, whose value is compared with a JSON value |
| Python source, or a list of sources | each `assert` at the top level with what stands before it; else all of it     |
"""

from __future__ import annotations

import ast
import builtins
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

SETUP = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
"""Statements that test nothing. A function or a class with tests does not either, as long as nobody calls it."""

MODULES = {
    name: frozenset(dir(importlib.import_module(name)))
    for name in (
        *("bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools"),
        *("json", "math", "operator", "random", "re", "statistics", "string"),
    )
}
"""What tests use as if it were there, as it is where they run behind a program that imports it."""

Item = list[Any]
"""`["setup", source]`, `["test", source]` or `["call", call, expected]`: what a sandbox's tests are given."""

FORMS = (
    'Python source, a list of sources, a list of {"stdin", "stdout"} with texts, or a list of {"call", "expected"} '
    "with a Python expression and a JSON value"
)


@dataclass(frozen=True, slots=True)
class RowTests:
    """One of both is empty. programs: (stdin, stdout); items: in order, setups among the tests that need them."""

    programs: tuple[tuple[str, str], ...] = ()
    items: tuple[Item, ...] = ()

    @property
    def count(self) -> int:
        return len(self.programs) + sum(1 for item in self.items if item[0] != "setup")

    def after(self, done: int) -> list[Item]:
        """The items without the first `done` tests; their setups stay, as later ones may build on them."""
        left: list[Item] = []
        for item in self.items:
            if item[0] == "setup" or done == 0:
                left.append(item)
            else:
                done -= 1
        return left


def read_tests(given: object) -> RowTests:
    """The tests that a row has. Raises ValueError, of one line, for what is none.

    >>> read_tests("import math\\nassert f(4) == math.sqrt(16)").items
    (['setup', 'import math'], ['test', 'assert f(4) == math.sqrt(16)'])
    >>> read_tests([{"stdin": "1 2", "stdout": "3"}]).count
    1
    """
    listed: Sequence[Any] = given if isinstance(given, list) else [given]
    if listed and all(isinstance(entry, str) for entry in listed):
        return _named(item for source in listed for item in _split(source))
    if listed and all(isinstance(entry, dict) and entry.keys() == {"stdin", "stdout"} for entry in listed):
        if all(isinstance(text, str) for entry in listed for text in entry.values()):
            return RowTests(programs=tuple((entry["stdin"], entry["stdout"]) for entry in listed))
    elif listed and all(isinstance(entry, dict) and entry.keys() == {"call", "expected"} for entry in listed):
        for entry in listed:
            _parsed(entry["call"], "eval")
        return _named(["call", entry["call"], entry["expected"]] for entry in listed)
    raise ValueError(f"tests are {given!r:.100}; they have to be {FORMS}")


def _split(source: str) -> Iterator[Item]:
    """One source as its tests, with what stands between them as setup."""
    body = _parsed(source, "exec").body
    if not any(isinstance(statement, ast.Assert) for statement in body):
        yield ["setup" if all(isinstance(statement, SETUP) for statement in body) else "test", source]
        return
    waiting: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.Assert):
            if waiting:
                yield ["setup", _unparsed(waiting)]
            waiting = []
            yield ["test", _unparsed([statement])]
        else:
            waiting.append(statement)
    if not all(isinstance(statement, SETUP) for statement in waiting):  # a call of a function with tests, perhaps
        yield ["test", _unparsed(waiting)]


def _unparsed(statements: list[ast.stmt]) -> str:
    return "\n".join(map(ast.unparse, statements))


def _named(items: Iterator[Item]) -> RowTests:
    """Refuse tests that pass without an answer. Names that are built in stay what they are (`sandbox_calls.py`), and
    so do modules that tests use without importing them: they are imported first, and are no name of the answer's."""
    found = RowTests(items=tuple(items))
    trees = [_parsed(item[1], "eval" if item[0] == "call" else "exec") for item in found.items]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    own = {node.id for node in names if isinstance(node.ctx, ast.Store)} | set(dir(builtins))
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            own.add(node.name)
        elif isinstance(node, ast.alias):
            own.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            own.add(node.arg)
    attributes = [(node.value, node.attr) for node in nodes if isinstance(node, ast.Attribute)]
    modules = {of.id for of, name in attributes if isinstance(of, ast.Name) and name in MODULES.get(of.id, ())} - own
    if not found.count or not {node.id for node in names} - own - modules:
        raise ValueError(
            "nothing is tested: no assert and no call uses a name of the answer's that is not built into Python"
        )
    return RowTests(items=(*(["setup", f"import {name}"] for name in sorted(modules)), *found.items))


def _parsed(source: object, mode: str) -> Any:
    if not isinstance(source, str):
        raise ValueError(f"{source!r:.100} is no Python source")
    try:
        return ast.parse(source, mode=mode)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{source!r:.100} is no Python: {error}") from None
