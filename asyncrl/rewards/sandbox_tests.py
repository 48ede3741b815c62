"""What runs in the processes of an answer and of its tests, which `sandbox_zygote.py` forks, once their walls stand."""

from __future__ import annotations

import json
import math
import os
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from asyncrl.rewards.sandbox_calls import Foreign, Gone, NotGiven, Peer

GONE = "gone"
"""Class of the last record where the answer's process did not answer any more."""

SAW_THE_END = 3  # exit code of the tests then
DEEPEST = 10_000  # calls in tests, whatever they set: beyond them what an answer sends could overflow the stack
RUNTIME_ERROR = "runtime_error"
WRONG_OUTPUT = "wrong_output"
MEMORY = "memory"
FORBIDDEN = "forbidden"
UNFIT = "unfit"  # a fault of the test's, for which no answer is scored
CLASSES = {MemoryError: MEMORY, PermissionError: FORBIDDEN}
"""Of what a test raises that the answer's process raised."""


def run_module(name: str, source: str) -> types.ModuleType:
    """Run a program as the module of that name, as `python answer.py` would: with none of this file's futures."""
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = "answer.py"
    exec(compile(source, "answer.py", "exec", dont_inherit=True), module.__dict__)
    return module


def serve_module(module: types.ModuleType, peer: Peer) -> NoReturn:
    """Let the tests call what a module has."""
    names = module.__dict__.items()
    with suppress(Gone):
        peer.send_names({n: v for n, v in names if not n.startswith("__") and not isinstance(v, types.ModuleType)})
        peer.serve()
    os._exit(0)


def run_tests(peer: Peer, items: list[list[Any]], *, ticks: int, records: int) -> NoReturn:
    """Be the tests: a record when the answer's own code is through, and one for each test, in memory of the verifier's;
    and a tick each, by which time is measured. items: ["setup", source], ["test", source], or ["call", call,
    expected]."""

    def record(wrong: str, detail: str = "") -> None:
        line = json.dumps([wrong, detail[:500]])
        os.write(records, line.encode() + b"\n")
        os.write(ticks, b".")

    set_limit = sys.setrecursionlimit
    sys.setrecursionlimit = lambda limit: set_limit(min(limit, DEEPEST))
    try:
        module = sys.modules["__main__"] = types.ModuleType("__main__")  # where unittest.main() looks for tests
        namespace = module.__dict__
        try:
            namespace.update(peer.receive_names())
        except Exception as error:  # MemoryError, of what is no name of a function
            raise Gone(f"its names cannot be taken: {text(error)}") from None
        record("")
        for kind, *content in items:
            wrong, detail = tested(peer, content, namespace)
            if kind != "setup" or wrong:
                record(wrong, detail)
            if kind == "setup" and wrong:  # nothing after it means anything
                break
    except Gone as error:
        record(GONE, str(error))
        os._exit(SAW_THE_END)
    os._exit(0)


def tested(peer: Peer, content: list[Any], namespace: dict[str, Any]) -> tuple[str, str]:
    """Run one test. Class of what is wrong, "" if nothing, and the detail. Raises Gone, and nothing else: tests that
    do not end well are no fault of the answer's, and it would make use of that."""
    source = content[0]
    try:
        if len(content) == 1:
            exec(compile(source, "tests.py", "exec", dont_inherit=True), namespace)
            return "", ""
        found = eval(compile(source, "tests.py", "eval", dont_inherit=True), namespace)
        if same(found, content[1]):
            return "", ""
        return WRONG_OUTPUT, f"{source:.200} is {text(found, repr):.150}, expected {content[1]!r:.150}"
    except AssertionError as error:
        if error is not peer.raised:
            return WRONG_OUTPUT, f"failed: {source:.300} {text(error)}"
        return RUNTIME_ERROR, f"AssertionError: {error}, in {source:.300}"
    except SystemExit as error:  # a test's own: what the answer raises is another class by then
        if error.code is None or error.code == 0:  # an object of the answer's equals neither
            return "", ""
        return WRONG_OUTPUT, f"exit code {text(error.code)} of {source:.300}"
    except NotGiven as error:
        return UNFIT, f"{error}, in {source:.300}"
    except Exception as error:
        last = text(error) if isinstance(error, Foreign) else f"{type(error).__name__}: {text(error)}".rstrip(": ")
        wrong = CLASSES.get(type(error), RUNTIME_ERROR) if error is peer.raised else RUNTIME_ERROR
        return wrong, f"{last}, in {source:.300}"


def text(value: object, of: Callable[[object], str] = str) -> str:
    """What is said of a value for a person, which may be, or hold, an object of the answer's: its `__str__` is the
    answer's as well, and an integer of 5,000 digits has no text at all."""
    try:
        return of(value)
    except Exception as error:
        return f"{type(value).__name__} without a text ({type(error).__name__})"


def same(found: object, expected: object) -> bool:
    """Whether a value is what a row expects, which JSON has: a tuple is a list there, and a key is text.

    >>> same((1, 2.0000000000001), [1, 2]), same({1: True}, {"1": True}), same(True, 1)
    (True, True, False)
    """
    if isinstance(expected, bool) or isinstance(found, bool):
        return found is expected
    if isinstance(expected, float | int) and isinstance(found, float | int):
        if isinstance(expected, int) and isinstance(found, int):
            return found == expected
        try:
            return math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-9)
        except OverflowError:  # an integer that no float is near to
            return found == expected
    if isinstance(expected, list) and isinstance(found, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, dict) and isinstance(found, dict):
        named = {key if isinstance(key, str) else json.dumps(key) for key in found}
        if len(named) != len(found) or named != set(expected):
            return False
        return all(
            same(value, expected[key if isinstance(key, str) else json.dumps(key)]) for key, value in found.items()
        )
    return type(found) is type(expected) and found == expected
