"""Tests of rows: what is taken for one, and what is refused because it would pass without an answer."""

from __future__ import annotations

import pytest

from asyncrl.rewards.code import last_block, lines
from asyncrl.rewards.code_tests import read_tests
from asyncrl.rewards.time_limit import limit


def test_each_assert_is_a_test_and_what_stands_before_it_sets_it_up() -> None:
    source = "import math\nx = 4\nassert f(x) == 2\nassert g(x) == math.inf\ny = 1\nassert f(y) == 1\n"
    assert [item[0] for item in read_tests(source).items] == ["setup", "test", "test", "setup", "test"]
    assert read_tests(source).count == 3


def test_source_without_an_assert_at_the_top_is_one_test() -> None:
    source = "def check(f):\n    assert f(1) == 2\n\ncheck(add_one)\n"
    assert read_tests(source).items == (["test", source],)


def test_statements_behind_the_last_assert_are_a_test() -> None:
    assert [item[0] for item in read_tests("assert f(1)\ncheck(f)").items] == ["test", "test"]


def test_a_list_of_asserts_is_as_many_tests() -> None:
    assert read_tests(["assert f(1) == 2", "assert f(2) == 3"]).count == 2


def test_what_only_sets_up_is_no_test_that_always_passes() -> None:
    found = read_tests(["", "import math", "assert f(1) == 2\nx = 1"])
    assert [item[0] for item in found.items] == ["setup", "setup", "test"]


def test_a_module_that_is_used_without_an_import_is_imported_first() -> None:
    source = "assert math.isclose(f(1), 2)\nassert f(copy.copy([1])) == queue.size"
    assert read_tests(source).items[:2] == (["setup", "import copy"], ["setup", "import math"])
    for own in (
        "import math\nassert math.isclose(f(1), 2)",
        "math = g()\nassert math.isclose(1)",
        "assert math.double(1)",
    ):
        assert (
            len(read_tests(own).items) == own.count("\n") + 1
        )  # the last one's has no such function: it is the answer's
    with pytest.raises(ValueError, match="nothing is tested"):
        read_tests("assert math.sqrt(4) == 2")


def test_tests_that_are_done_are_left_out_and_their_setups_stay() -> None:
    found = read_tests("a = 1\nassert f(a)\nb = 2\nassert f(b)")
    assert found.after(1) == [["setup", "a = 1"], ["setup", "b = 2"], ["test", "assert f(b)"]]


@pytest.mark.parametrize(
    "given",
    [
        *(None, 7, [], {}, [None], ["assert f(1)", 2], [{"stdin": "1"}], [{"stdin": 1, "stdout": "2"}]),
        *([{"stdin": "1", "stdout": "2", "x": 1}], [{"call": "f(1)"}], [{"call": 5, "expected": 1}]),
        *("assert f(", [{"call": "f(1", "expected": 1}], [{"call": "x = f(1)", "expected": 1}], "assert \0"),
        *([{"stdin": "1", "stdout": "2"}, {"call": "f(1)", "expected": 2}], "(" * 1000 + ")" * 1000),
    ],
)
def test_what_is_no_test_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match=r"tests are|is no Python"):
        read_tests(given)


@pytest.mark.parametrize(
    "given",
    [
        *("", "x = 1", "assert 1 == 1", "def check(f): assert f(1)", "assert abs(-1) == 1"),
        "def test_double():\n    assert double(2) == 4\n",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(double(2), 4)\n",
        ["import math", "x = double(2)"],
    ],
)
def test_tests_that_pass_whatever_the_answer_is_are_refused(given: str) -> None:
    with pytest.raises(ValueError, match="nothing is tested"):
        read_tests(given)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("no code", None),
        ("```python\nopen", None),
        ("```\nx\n```", "x"),
        ("```text\nx\n```", None),
        ("```python\nx\n```\n```text\ny\n```", "x"),
        ("```python\nx\n```\n```python\ny", "x"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''"),
        ("```Python3 title=a\r\nx\r\n```", "x"),
        ("```python\ns = '\u2028\x0c'\n```", "s = '\u2028\x0c'"),
        ("```python\n```", ""),
        ("`x` and ```python x```", None),
    ],
)
def test_the_last_closed_block_of_python_is_the_program(text: str, code: str | None) -> None:
    assert last_block(text) == code


def test_a_line_of_100_000_characters_is_looked_at_once() -> None:
    with limit(60):  # hours, where each beginning of it is tried with each rest
        for line in ("```" + "a" * 100_000 + "`", "```" + "\t" * 100_000 + "`", "`" * 100_000 + "a`"):
            assert last_block(f"```python\nx\n```\n{line}\n") == "x"


def test_outputs_are_compared_without_white_space_at_ends() -> None:
    assert lines("1 \n2\n\n") == lines("1\n2") != lines("1 2")
    assert lines(" 1") != lines("1")
    assert lines("") == lines("\n")
