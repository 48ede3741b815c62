"""Rows that no answer to could be scored, and verifiers that cannot be built, end a run before it starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from asyncrl.config.recipe import Collector, DataSource, SingleTurnTask, Task
from asyncrl.config.rewards import Choice, Exact, Function, Math, Overlong, RewardPart
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
    with pytest.raises(TaskError, match="No module named 'no_such_rewards'") as error:
        await checked(task_with(tmp_path, ["5", "6"], Function(function="no_such_rewards:score")))
    assert not isinstance(error.value, NotInstalled)


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
