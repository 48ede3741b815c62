"""Tasks from the recipe: a user's class with as little as possible, and every way it can be wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.recipe import CustomTask, ReverseTask
from asyncrl.tasks.base import Answer, Row, Task, TaskError
from asyncrl.tasks.build import build_task

UserModule = Callable[[str], Path]

SMALL = """
class Upper:
    def rows(self, split):
        return [Row(id=word, prompt=f"upper {word}", answer=word.upper()) for word in ("one", "two")]
    def score(self, row, answer):
        return float(answer.text == row.answer)
"""


def custom(name: str = "my_task:Upper", **args: Any) -> Task:
    return build_task(CustomTask(type=name, args=args), seed=7)


def test_a_class_with_rows_and_score_is_a_task(user_module: UserModule) -> None:
    user_module(SMALL)
    task = custom()
    row = task.rows("train")[1]
    assert task.name == "my_task:Upper"
    assert task.messages(row) == [{"role": "user", "content": "upper two"}]
    assert task.score(row, Answer("TWO", (), "stop")) == 1.0
    assert task.part_weights() == {}


def test_everything_may_be_said_by_the_class_itself(user_module: UserModule) -> None:
    user_module(
        """
class Own:
    name = "own"
    def __init__(self, size, seed): self.size, self.seed = size, seed
    def rows(self, split): return [Row(str(i), f"{self.seed}") for i in range(self.size)]
    def messages(self, row): return [{"role": "system", "content": "s"}, {"role": "user", "content": row.prompt}]
    def score(self, row, answer): return {"a": 1.0, "b": None}
    def part_weights(self): return {"a": 2}
"""
    )
    task = custom("my_task:Own", size=3)
    assert (task.name, len(task.rows("heldout")), task.part_weights()) == ("own", 3, {"a": 2.0})
    assert [message["content"] for message in task.messages(task.rows("train")[0])] == ["s", "7"]
    assert custom("my_task:Own", size=1, seed=9).rows("train")[0].prompt == "9"


def test_a_system_prompt_of_the_class_is_used(user_module: UserModule) -> None:
    user_module(SMALL.replace("class Upper:", "class Upper:\n    system_prompt = 'Shout.'"))
    task = custom()
    assert task.messages(task.rows("train")[0])[0] == {"role": "system", "content": "Shout."}


def test_the_working_folder_is_searched_last(user_module: UserModule, tmp_path: Path) -> None:
    user_module(SMALL)
    custom()
    custom()
    assert sys.path[-1] == str(tmp_path)
    assert sys.path.count(str(tmp_path)) == 1


def test_the_built_in_task_needs_no_seed() -> None:
    one, other = (build_task(ReverseTask(digits=(3, 6)), seed=seed) for seed in (0, 1))
    assert one.name == "reverse"
    assert one.rows("train")[5] == other.rows("train")[5]


ROWS = "    def rows(self, split): return [Row('1', 'p')]\n"
SCORE = "    def score(self, row, answer): return 1.0\n"


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("revers", "", r"'revers' is no built-in task: did you mean 'reverse'\?"),
        ("other", "", r"'other' is no built-in task: use reverse, uppercase, .*, or module:Class"),
        ("my_task:", "", r"'my_task:' is no built-in task"),
        ("no_task:A", "", r"there is no module no_task in /.*\n.*no_task\.py, or add its folder to PYTHONPATH"),
        ("no.task:A", "", r"there is no module no in /"),
        ("my_task:A", "import no_such_library", r"importing my_task raised ModuleNotFoundError: .*my_task\.py:3"),
        ("my_task:A", "1/0", r"importing my_task raised ZeroDivisionError: division by zero \(.*my_task\.py:3\)"),
        ("my_task:A", "def f(:", r"importing my_task raised SyntaxError: .* \(.*my_task\.py:3\)$"),
        ("my_task:A", "raise SystemExit(0)", r"importing my_task raised SystemExit: 0 \(.*my_task\.py:3\)"),
        ("__main__:A", "", r"__main__:A: other processes .*write it into a file"),
        (
            "my_task:A",
            "class A:\n    def __init__(self): raise SystemExit('done')\n",
            r"constructor raised SystemExit: done",
        ),
        ("my_task:Uper", SMALL, r"my_task\.py has no class Uper; did you mean 'Upper'\?"),
        ("my_task:Zzz", SMALL, r"has no class Zzz; its classes are: Upper"),
        ("my_task:A", "A = 3", r"has no class A; its classes are: none"),
        (
            "my_task:A",
            "class A:\n    def __init__(self): raise OSError('disk')",
            r"constructor raised OSError: disk \(.*:4",
        ),
        (
            "my_task:A",
            "class A:\n    def __init__(self, n): pass",
            r"constructor raised TypeError: .*'n'.*\n.*task\.args \{\}",
        ),
        ("my_task:A", "class A:\n" + SCORE, r"no method rows: add `def rows\(self, split\)`"),
        ("my_task:A", "class A:\n" + ROWS, r"no method score: add `def score\(self, row, answer\)`"),
        (
            "my_task:A",
            "class A:\n    def score(self, answer): return 1.0\n" + ROWS,
            r"score cannot be called with a row and an answer \(too many .*: write `def score\(self, row, answer\)`",
        ),
        (
            "my_task:A",
            "class A:\n    def score(self, row, answer, model): return 1.0\n" + ROWS,
            r"\(missing a required argument: 'model'\)",
        ),
        ("my_task:A", "class A:\n    async def score(self, row, answer): return 1.0\n" + ROWS, r"score is async, and"),
        ("my_task:A", "class A:\n    def rows(self): pass\n" + SCORE, r"rows\('train'\) raised TypeError"),
        ("my_task:A", "class A:\n    def rows(self, split): return []\n" + SCORE, r"rows\('train'\) is empty"),
        (
            "my_task:A",
            "class A:\n    def rows(self, s): yield 1\n" + SCORE,
            r"returned a generator without len\(\) and \[i\]",
        ),
        ("my_task:A", "class A:\n    def rows(self, s): return None\n" + SCORE, r"returned a NoneType without len\(\)"),
        ("my_task:A", "class A:\n    def rows(self, s): return ['x']\n" + SCORE, r"\[0\] is 'x': return .*Row"),
        (
            "my_task:A",
            "class A:\n    def rows(self, s): return [Row(1, 'p')]\n" + SCORE,
            r"\[0\] is Row\(id=1.*return .*Row",
        ),
        (
            "my_task:A",
            "class A:\n    def rows(self, s): return [Row('1', ['p'])]\n" + SCORE,
            r"first train row has no conv",
        ),
        (
            "my_task:A",
            "class A:\n    def rows(self, s): return [Row('1', 'p', (1,))]\n" + SCORE,
            r"answer is \(1,\), which",
        ),
        (
            "my_task:A",
            "class A:\n    def rows(self, s): return [Row('1', 'p', {1})]\n" + SCORE,
            r"answer is \{1\}, which",
        ),
        (
            "my_task:A",
            "class A:\n    def rows(self, s): return [Row('1', 'p'), Row('2', 'p'), Row('1', 'q')]\n" + SCORE,
            r"rows\('train'\): rows 0 and 2 have the same id '1'",
        ),
        (
            "my_task:A",
            "class A:\n    def rows(self, s): return [Row('1', 'p'), None]\n" + SCORE,
            r"rows\('train'\)\[1\] raised AttributeError",
        ),
        ("my_task:A", "class A:\n    def rows(self, s): return [Row('1', 'p', A)]\n" + SCORE, r"answer cannot be sent"),
        (
            "my_task:A",
            "class A:\n    def part_weights(self): return 3\n" + ROWS + SCORE,
            r"part_weights\(\) returned a int",
        ),
        (
            "my_task:A",
            "class A:\n    def rows(self, split): return [Row('1', 'p')] * (split == 'train')\n" + SCORE,
            r"rows\('heldout'\) is empty",
        ),
    ],
)
def test_a_wrong_task_is_refused_with_what_and_where(
    user_module: UserModule, name: str, source: str, message: str
) -> None:
    user_module(source)
    with pytest.raises(TaskError, match=message) as caught:
        custom(name)
    assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize("module", ["random", "json", "torch", "sys", "os"])
def test_a_file_that_is_named_like_a_library_is_refused_and_the_library_not_imported(
    user_module: UserModule, tmp_path: Path, module: str
) -> None:
    user_module("")
    (tmp_path / f"{module}.py").write_text("raise RuntimeError('never imported')")
    with pytest.raises(
        TaskError, match=rf"{module} is .*, which hides {tmp_path}/{module}\.py\.\nRename .*my_{module}"
    ):
        custom(f"{module}:Upper")


def test_a_package_that_is_named_like_a_library_is_refused(user_module: UserModule, tmp_path: Path) -> None:
    user_module("")
    (tmp_path / "email").mkdir()
    (tmp_path / "email" / "__init__.py").touch()
    (tmp_path / "email" / "tasks.py").write_text(SMALL)
    with pytest.raises(TaskError, match=r"email is .*/email/__init__\.py, which hides"):
        custom("email.tasks:Upper")


def test_files_beside_the_task_hide_no_library(user_module: UserModule, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('not the real one')")
    user_module("import json\njson.dumps(1)\n" + SMALL)
    assert custom().rows("train")


def test_rows_are_the_ones_the_user_returned(user_module: UserModule) -> None:
    user_module(SMALL)
    assert isinstance(custom().rows("train")[0], Row)


def test_rows_are_asked_for_once(user_module: UserModule) -> None:
    """A class that reads its file, or shuffles, whenever it is asked would be asked so for every ticket."""
    user_module(
        """
class Counts:
    def __init__(self): self.asked = []
    def rows(self, split):
        self.asked.append(split)
        return [Row(f"{split}-{len(self.asked)}", "p")]
    def score(self, row, answer): return 1.0
"""
    )
    task = build_task(CustomTask(type="my_task:Counts"), seed=0)
    assert [task.rows("train")[0].id, task.rows("heldout")[0].id, task.rows("train")[0].id] == [
        "train-1",
        "heldout-2",
        "train-1",
    ]
