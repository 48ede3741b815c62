"""The part `code`: only tests that ran and passed count, whatever the program does to them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asyncrl.config.rewards import Code
from asyncrl.rewards.base import BadRow, Finding
from asyncrl.rewards.code import CodeTests

TESTS = ["import math\nassert double(2) == 4", "assert double(21) == 42", "assert abs(double(0.5) - 1) < 1e-9"]
RIGHT = "def double(n):\n    return 2 * n"

Check = Callable[..., Finding]


@pytest.fixture(scope="module")
def verifiers() -> Iterator[dict[str, CodeTests]]:
    limits: dict[str, Any] = {"test_timeout_s": 20, "total_timeout_s": 60, "memory_limit": "128MiB"}
    made = {
        "all": CodeTests(Code(**limits)),
        "share": CodeTests(Code(score="share", **limits)),
        "quick": CodeTests(Code(score="share", test_timeout_s=0.5, total_timeout_s=60)),
    }
    yield made
    for verifier in made.values():
        verifier.close()


def row(tests: object) -> dict[str, Any]:
    return {"id": "rows.jsonl:1", "prompt": "p", "answer": None, "info": {"tests": tests}}


def answer(code: str, finish_reason: str = "stop") -> dict[str, Any]:
    return {"text": f"Like this:\n```python\n{code}\n```\n", "token_ids": [], "finish_reason": finish_reason}


@pytest.fixture
def check(verifiers: dict[str, CodeTests]) -> Check:
    def check(code: str, tests: object = TESTS, kind: str = "all") -> Finding:
        return verifiers[kind].verify(row(tests), answer(code))

    return check


def naive(code: str, tests: list[str]) -> bool:
    """How such tests are often run, and what the cheats below are for: behind the program, in its process."""
    source = "\n".join([code, *tests])
    return subprocess.run([sys.executable, "-c", source], capture_output=True, timeout=60, check=False).returncode == 0


def test_a_program_that_passes_its_tests_is_worth_1(check: Check) -> None:
    assert check(RIGHT) == Finding({"code": 1.0})


@pytest.mark.parametrize(
    "tests",
    [
        "def check(candidate):\n    for n in range(3):\n        assert candidate(n) == 2 * n\n\ncheck(double)",
        [{"call": "double(2)", "expected": 4}, {"call": "double([1])", "expected": [1, 1]}],
        [{"call": "[double(1), double('a')]", "expected": [2, "aa"]}],
    ],
)
def test_tests_may_be_functions_and_values(check: Check, tests: object) -> None:
    assert check(RIGHT, tests) == Finding({"code": 1.0})
    assert check("def double(n): return 5", tests).wrong == "wrong_output"


def test_tests_may_be_a_script_of_unittest(check: Check) -> None:
    script = (
        "import unittest\n"
        "class Double(unittest.TestCase):\n"
        "    def test_two(self): self.assertEqual(double(2), 4)\n"
        "if __name__ == '__main__':\n"
        "    unittest.main()\n"
    )
    assert check(RIGHT, script) == Finding({"code": 1.0})
    for wrong in ("def double(n): return 5", "def load_tests(*_): return 0\ndef double(n): return 5"):
        assert check(wrong, script).parts == {"code": 0.0}


def test_programs_are_tested_by_what_they_print(check: Check) -> None:
    tests = [{"stdin": "2\n", "stdout": "4\n"}, {"stdin": "3", "stdout": "6"}]
    assert check("print(2 * int(input()))", tests) == Finding({"code": 1.0})
    assert check("print(2 * int(input()), end='  \\n\\n')", tests) == Finding({"code": 1.0})
    assert check("print(4)", tests, "share").parts == {"code": 0.5}
    assert check("print(4)", tests).detail == "for '3' printed '4\\n', expected '6'"
    assert check("print(2 * int(input()))\nraise SystemExit(1)", tests).wrong == "runtime_error"


def test_the_share_of_tests_counts_where_it_is_asked_for(check: Check) -> None:
    half = "def double(n):\n    return 4 if n == 2 else 1"
    assert check(half).parts == {"code": 0.0}
    found = check(half, TESTS, "share")
    assert found.parts == {"code": pytest.approx(2 / 3)}
    assert (found.wrong, found.detail) == ("wrong_output", "2 of 3 tests passed; failed: assert double(21) == 42 ")


@pytest.mark.parametrize("fault", ["while n == 21: pass", "if n == 21: import os; os._exit(0)", "if n == 21: exit()"])
def test_after_a_test_that_kills_the_program_the_others_still_run(check: Check, fault: str) -> None:
    found = check(f"def double(n):\n    {fault}\n    return 2 * n", TESTS, "quick")
    assert found.parts == {"code": pytest.approx(2 / 3)}


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("def double(n:", "syntax_error"),
        ("  x = 1\n y = 2", "syntax_error"),
        ("raise ValueError(3)", "runtime_error"),
        ("def double(n): return 1 / 0", "runtime_error"),
        ("def triple(n): return 3 * n", "runtime_error"),
        ("def double(n): return double(n)", "runtime_error"),
        ("import ctypes\ndef double(n): ctypes.string_at(0)", "runtime_error"),
        ("def double(n): return 2 * n + 1", "wrong_output"),
        ("def double(n): assert False", "runtime_error"),
        ("x = bytearray(1 << 30)", "memory"),
        ("def double(n): return bytearray(1 << 30)", "memory"),
        ("while True: print('x' * 1000)", "output_flood"),
        ("def double(n):\n    while True: print('x' * 1000)", "output_flood"),
        ("import socket\nsocket.socket()", "forbidden"),
        ("def double(n): return open('/etc/passwd').read()", "forbidden"),
        ("import os\nos.fork()", "forbidden"),
        ("open('a', 'wb').write(bytes(100 << 20))", "disk_flood"),
        ("def double(n): return 'x' * (20 << 20)", "runtime_error"),
        ("", "runtime_error"),
    ],
)
def test_what_is_wrong_with_a_program_has_a_class(check: Check, code: str, wrong: str) -> None:
    found = check(code)
    assert (found.parts, found.wrong) == ({"code": 0.0}, wrong)
    assert len(found.detail) < 1000


BAD_TEXT = "class Odd:\n    def __str__(self): BODY\n    __repr__ = __str__\ndef double(n): return Odd()"


@pytest.mark.parametrize(
    "code",
    [
        *(BAD_TEXT.replace("BODY", body) for body in ("raise ValueError(3)", "return 5", "import os; os._exit(0)")),
        "class Odd:\n    def __bool__(self): raise ValueError(3)\n    __str__ = __bool__\ndef double(n): return Odd()",
        "def double(n): return 10**5000",
        "def double(n): return '\\ud800'",
        "class Odd(Exception):\n    def __str__(self): raise ValueError(3)\ndef double(n): raise Odd",
    ],
)
@pytest.mark.parametrize(
    "test",
    [
        "assert double(2) == 4, double(2)",
        "import sys\nsys.exit(double(2))",
        [{"call": "double(2)", "expected": 4}],
        "raise ValueError(double(2))",
    ],
)
def test_an_answer_whose_values_have_no_text_is_wrong_not_unscored(check: Check, code: str, test: object) -> None:
    assert check(code, test).parts == {"code": 0.0}


def test_names_that_are_no_names_are_wrong_not_unscored(check: Check) -> None:
    for names in ('[["double", ' + "[" + "[]," * 1_500_000 + "[]]]]", '[["double", {"mine": Infinity}]]', "[[[], 1]]"):
        body = f'["names", {names}]'
        code = f"import os, time\nbody = {body!r}.encode()\nbody = len(body).to_bytes(4, 'big') + body\n"
        code += "while body: body = body[os.write(4, body):]\ntime.sleep(600)"
        assert check(code, TESTS, "quick").parts == {"code": 0.0}


def test_an_answer_that_is_deeper_than_a_stack_is_wrong_not_unscored(check: Check) -> None:
    """Where tests allow for it, for programs that recurse, Python's own limit does not keep it from them."""
    code = (
        "import os, time\n"
        "def send(body):\n"
        "    body = len(body).to_bytes(4, 'big') + body\n"
        "    while body: body = body[os.write(4, body):]\n"
        'send(b\'["names", [["double", {"mine": 0}]]]\')\n'
        "os.read(4, 999)\n"
        "send(b'[\"value\", ' + b'{\"t\": [' * 2_000_000 + b']}' * 2_000_000 + b', []]')\n"
        "time.sleep(600)"
    )
    test = "import sys\nsys.setrecursionlimit(10**7)\nassert double(2) == 4"
    assert check(code, test).parts == {"code": 0.0}


def test_what_a_program_leaves_behind_costs_the_next_one_nothing(check: Check) -> None:
    """Its folder is removed when its score is said already. The name is one that this took for folders of its own."""
    left = "import os\nfor n in range(9): os.makedirs(f'.{n}.removed/a'), os.mkdir(str(n))\ndef double(n): return 5"
    for _ in range(2):
        assert check(left).wrong == "wrong_output"
        assert check(RIGHT) == Finding({"code": 1.0})


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("def double(n: int): return double.__annotations__['n'](2 * n)", "assert double(2) == 4"),
        ("import math\ndef double(n): return 2.0 * n", "assert math.isclose(double(2), 4)"),
        ("def double(n, kind): return [x for x in n if isinstance(x, kind)]", "assert double([1, 'a'], str) == ['a']"),
    ],
)
def test_a_right_program_passes(check: Check, code: str, test: str) -> None:
    assert check(code, test) == Finding({"code": 1.0})


def test_a_module_that_a_test_does_not_import_is_not_the_answers(check: Check) -> None:
    cheat = "class math:\n    isclose = lambda *_: True\ndef double(n): return 5"
    assert check(cheat, "assert math.isclose(double(2), 4)").parts == {"code": 0.0}


def test_a_test_that_gives_what_cannot_be_given_scores_nobody(check: Check) -> None:
    with pytest.raises(BadRow, match=r"rows\.jsonl:1: a test can give data and functions to an answer, not a Node"):
        check("def double(n): return n.x", "class Node:\n    x = 1\nassert double(Node()) == 2")
    with pytest.raises(BadRow, match="not a list_iterator"):
        check("def double(n): return 5", ["assert double(2) == 4", "assert double(iter([1])) == 2"], "share")


def test_a_program_without_end_is_wrong_not_unscored(check: Check) -> None:
    for code in ("while True: pass", "def double(n):\n    while True: pass", "import time\ntime.sleep(600)"):
        found = check(code, TESTS[:1], "quick")
        assert (found.parts, found.wrong) == ({"code": 0.0}, "timeout")


def test_an_answer_without_a_program_or_an_end_is_wrong(verifiers: dict[str, CodeTests]) -> None:
    verifier = verifiers["all"]
    text = {"text": "It is 2 * n.", "finish_reason": "stop"}
    assert verifier.verify(row(TESTS), text) == Finding({"code": 0.0}, "no_code", "no closed block ```python")
    assert verifier.verify(row(TESTS), answer(RIGHT, "length")) == Finding({"code": 0.0}, "cut_off")


@pytest.mark.parametrize("tests", [None, [], "x = 1", "assert (", [{"stdin": 1}]])
def test_a_row_without_tests_scores_nobody(verifiers: dict[str, CodeTests], tests: object) -> None:
    with pytest.raises(BadRow, match=r"rows\.jsonl:1: tests: "):
        verifiers["all"].check(row(tests))
    with pytest.raises(BadRow):
        verifiers["all"].verify(row(tests), answer(RIGHT))


def test_the_answer_column_has_the_tests_where_no_other_has(verifiers: dict[str, CodeTests]) -> None:
    verifiers["all"].check({"id": "1", "answer": "assert double(1) == 2", "info": {}})
    with pytest.raises(BadRow, match="row 1: the answer: "):
        verifiers["all"].check({"id": "1", "answer": "42", "info": {}})


CHEATS = {
    "ends the process": "import os\nos._exit(0)",
    "ends it politely": "import sys\nsys.exit(0)",
    "ends it in a function": "import os\ndef double(n): os._exit(0)",
    "raises what ends it": "def double(n): raise SystemExit(0)",
    "ends it behind the tests": "import atexit, os\natexit.register(os._exit, 0)\ndef double(n): return 5",
    "catches what is raised": "import os, sys\nsys.excepthook = lambda *_: os._exit(0)\ndef double(n): return 5",
    "equals everything": (
        "class Anything:\n"
        "    def __eq__(self, other): return True\n"
        "    def __sub__(self, other): return 0\n"
        "def double(n): return Anything()"
    ),
    "is a number that equals everything": (
        "class Anything(float):\n"
        "    def __eq__(self, other): return True\n"
        "    def __sub__(self, other): return 0\n"
        "def double(n): return Anything(5)"
    ),
    "reads what is expected": (
        "import sys\n"
        "def double(n):\n"
        "    numbers = [held for held in sys._getframe(1).f_code.co_consts if isinstance(held, int)]\n"
        "    return numbers[numbers.index(n) + 1]"
    ),
}


@pytest.mark.faults
@pytest.mark.parametrize("cheat", CHEATS)
def test_no_cheat_passes_that_passes_where_tests_run_in_the_programs_process(check: Check, cheat: str) -> None:
    assert check(CHEATS[cheat], TESTS[:1]).parts == {"code": 0.0}
    assert naive(CHEATS[cheat], TESTS[:1])


REPLACED = {
    "a builtin function": ("def abs(n): return 0\ndef double(n): return 5", "assert abs(double(0.5) - 1) < 1e-9"),
    "all builtins": (
        "import builtins\nbuiltins.abs = lambda n: 0\ndef double(n): return 5",
        "assert abs(double(0.5) - 1) < 1e-9",
    ),
    "a module": (
        "import math\nmath.isclose = lambda *a: True\ndef double(n): return 5",
        TESTS[0][:12] + "assert math.isclose(double(2), 4)",
    ),
    "a test library": (
        "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\ndef double(n): return 5",
        "import unittest\nunittest.TestCase().assertEqual(double(2), 4)\ndouble",
    ),
}


@pytest.mark.faults
@pytest.mark.parametrize("what", REPLACED)
def test_nothing_that_a_program_replaces_changes_its_tests(check: Check, what: str) -> None:
    code, test = REPLACED[what]
    assert check(code, [test]).parts == {"code": 0.0}
    assert check(RIGHT, [test]).parts == {"code": 1.0}
    assert naive(code, [test])


@pytest.mark.faults
@pytest.mark.parametrize(
    "body",
    [
        "os.write(4, b'\\0\\0\\0\\x10[\"value\", 4, []]')",
        "os.write(4, b'\\xff' * 100)",
        "os.close(4)",
        "[os.close(n) for n in range(5)]",
        'print(\'["", ""]\\n\' * 10)',
        "os.dup2(1, 4)",
        "os.ftruncate(3, 0)",
    ],
)
def test_what_a_program_writes_to_descriptors_passes_no_test(check: Check, body: str) -> None:
    tests = [f"assert double({n}) == {2 * n}" for n in range(2, 5)]
    for code in (f"import os\n{body}\nos._exit(0)", f"import os\n{body}\ndef double(n): return 5"):
        assert check(code, tests, "share").parts == {"code": 0.0}
