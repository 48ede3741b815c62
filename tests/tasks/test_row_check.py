"""Rows that no answer to could be scored, and verifiers that cannot be built, end a run before it starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from asyncrl.config.recipe import Collector, DataSource, SingleTurnTask, Task
from asyncrl.config.rewards import Choice, Exact, Function, Math, Overlong, RewardPart, ToolCall, ToolPolicy
from asyncrl.tasks.base import NotInstalled, TaskError
from asyncrl.tasks.row_check import check_rows
from tests.commands import Ended


def data(folder: Path, answers: Sequence[object]) -> DataSource:
    """A file of its own for each split."""
    for name in ("train", "heldout"):
        lines = (json.dumps({"prompt": f"{name} {n}", "answer": answer}) for n, answer in enumerate(answers))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return DataSource(train=str(folder / "train.jsonl"), heldout=str(folder / "heldout.jsonl"))


def task_with(folder: Path, answers: Sequence[object], *parts: RewardPart) -> Task:
    return SingleTurnTask(type="single-turn", data=data(folder, answers), rewards=list(parts))


async def checked(task: Task) -> None:
    await check_rows(task, Collector(), seed=0)


@pytest.mark.asyncio
async def test_rows_that_can_be_scored_pass_whatever_comes_behind_the_first_hundred(tmp_path: Path) -> None:
    rows = [*["5"] * 100, "A"]
    await checked(task_with(tmp_path, rows, Math(), Exact(), Overlong(buffer_tokens=2)))


@pytest.mark.asyncio
async def test_the_first_rows_that_cannot_be_scored_are_counted_and_named(tmp_path: Path) -> None:
    rows = ["5", "A", "x^2", "listen", *["7"] * 200]
    with pytest.raises(TaskError) as error:
        await checked(task_with(tmp_path, rows, Exact(), Math(name="sums")))
    first, *named = str(error.value).splitlines()
    assert "2 of the first 100 train rows cannot be scored by `sums`" in first
    assert [line.split(": ")[0].strip() for line in named] == ["row train.jsonl:2", "row train.jsonl:4"]


@pytest.mark.asyncio
async def test_held_out_rows_are_looked_at_too(tmp_path: Path) -> None:
    task = task_with(tmp_path, ["A", "B"], Choice())
    (tmp_path / "heldout.jsonl").write_text('{"prompt": "p", "answer": "E"}')
    with pytest.raises(TaskError, match="1 of the first 1 heldout rows cannot be scored by `choice`"):
        await checked(task)


@pytest.mark.asyncio
async def test_a_verifier_whose_library_is_not_here_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "math_verify.py").write_text("raise ModuleNotFoundError('No module named math_verify')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(NotInstalled, match=r"pip install 'asyncrl\[math\]'"):
        await checked(task_with(tmp_path, ["5", "6"], Math()))


@pytest.mark.asyncio
async def test_a_function_that_fails_to_import_is_an_error_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_reward.py").write_text("1 / 0\ndef score(row, answer): return 1.0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TaskError, match=r"ZeroDivisionError.*broken_reward\.py:1"):
        await checked(task_with(tmp_path, ["5", "6"], Function(function="broken_reward:score")))


@pytest.mark.asyncio
async def test_a_function_that_there_is_not_is_the_recipes_fault_and_not_a_lacking_package(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"there is no module no_such_rewards in .*, nor an installed one") as error:
        await checked(task_with(tmp_path, ["5", "6"], Exact(), Function(function="no_such_rewards:score")))
    assert not isinstance(error.value, NotInstalled)
    assert str(error.value).startswith("task.rewards[1].function no_such_rewards:score: ")


SOURCE = """
def score(row, answer): return 1.0
def alone(answer): return 1.0
async def later(row, answer): return 1.0
def pay(amount): return amount
def forbids(arguments): return False
def forgets(arguments): arguments
"""


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("scor", r"has no function scor; did you mean 'score'\?"),
        ("alone", r"cannot be called with \(row, answer\), .*: write `def alone\(row, answer\)`"),
        ("later", r"is async, .*: write `def later\(row, answer\)`"),
    ],
)
async def test_a_function_that_no_answer_could_be_given_to_is_named_with_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, said: str
) -> None:
    (tmp_path / "own_reward.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    await checked(task_with(tmp_path, ["5", "6"], Function(function="own_reward:score")))
    with pytest.raises(TaskError, match=rf"task\.rewards\[0\]\.function own_reward:{function}.* {said}"):
        await checked(task_with(tmp_path, ["5", "6"], Function(function=f"own_reward:{function}")))


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("pay", "stop")]


def calls(folder: Path, *tools: ToolPolicy) -> Task:
    """Rows that want a payment, and what the recipe says of tools."""
    row = {"prompt": "pay 5", "answer": '{"name": "pay", "arguments": {"amount": 5}}', "tools": TOOLS}
    for name in ("train", "heldout"):
        (folder / f"{name}.jsonl").write_text(json.dumps(row))
    source = DataSource(train=str(folder / "train.jsonl"), heldout=str(folder / "heldout.jsonl"))
    return SingleTurnTask(type="single-turn", data=source, rewards=[ToolCall(tools=list(tools))])


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({"function": "own_reward:pai"}, r"tools\[0\]\.function own_reward:pai: .* did you mean 'pay'\?"),
        ({"safe": "own_reward:score"}, r"tools\[0\]\.safe own_reward:score cannot be called with \(arguments\)"),
        ({"safe": "own_reward:forbids"}, "the policy forbids the expected call"),
        ({"safe": "own_reward:forgets"}, "the policy of pay returned None: return True or False"),
    ],
)
async def test_a_policy_that_cannot_decide_is_no_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: dict[str, str], said: str
) -> None:
    (tmp_path / "own_reward.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TaskError, match=said):
        await checked(calls(tmp_path, ToolPolicy(name="pay", **policy)))


@pytest.mark.asyncio
async def test_a_policy_for_a_tool_that_no_row_has_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "own_reward.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    await checked(calls(tmp_path, ToolPolicy(name="pay", function="own_reward:pay"), ToolPolicy(name="stop")))
    assert not caplog.messages
    await checked(calls(tmp_path, ToolPolicy(name="pays", safe="own_reward:forbids")))
    (said,) = caplog.messages
    assert "none of the first 1 rows has a tool 'pays'" in said
    assert "did you mean 'pay'?" in said


@pytest.mark.asyncio
async def test_a_verifier_that_ends_its_process_is_an_error_and_not_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ending_reward.py").write_text("import os\nos._exit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TaskError, match="process ended"):
        await checked(task_with(tmp_path, ["5", "6"], Function(function="ending_reward:score")))


@pytest.mark.parametrize(
    "command",
    [("run",), ("run", "--dry-run"), pytest.param(("eval",), marks=pytest.mark.slow)],  # eval loads torch first
    ids=" ".join,
)
def test_every_command_refuses_such_rows_before_it_starts(
    called: Callable[..., Ended], tmp_path: Path, command: tuple[str, ...]
) -> None:
    data(tmp_path, ["5", "A", "6"])
    (tmp_path / "recipe.yaml").write_text(
        "extends: tiny-reverse\n"
        "task: {type: single-turn, data: {train: train.jsonl, heldout: heldout.jsonl}, rewards: [{type: math}]}\n"
    )
    name, *flags = command
    ended = called(name, "recipe.yaml", *flags)
    assert ended.returncode == 2
    assert "1 of the first 3 train rows cannot be scored by `math`" in ended.stderr
    assert not (tmp_path / "runs").exists()
