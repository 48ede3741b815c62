"""What was expected of a trained answer: looked up where it can be believed, else a reason."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.loading import load_recipe
from asyncrl.data.dataset import Dataset
from asyncrl.runtime import data_report
from asyncrl.runtime import folder as folders
from asyncrl.runtime.expected import lookup
from asyncrl.tasks.build import construct
from asyncrl.tasks.training import train_rows

DATA = """
model: {path: builtin:tiny}
task: {type: single-turn, data: {train: questions.jsonl}, rewards: [{type: exact}]}
"""

MIXTURE = """
model: {path: builtin:tiny}
task:
  type: mixture
  tasks:
    - {name: short, task: {type: reverse, digits: [2, 2]}}
    - {name: long, task: {type: reverse, digits: [5, 5]}}
"""

OWN = """
model: {path: builtin:tiny}
task: {type: "own_task_never_run:Task"}
"""


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run's folder of this recipe, as it is when the run begins, and the recipe."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "questions.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n} + 1", "answer": str(n + 1)}) + "\n" for n in range(20))
    )
    old = time.time() - 60
    os.utime("questions.jsonl", (old, old))

    def begin(text: str) -> tuple[Path, Any]:
        Path("given.yaml").write_text(text)
        loaded = load_recipe("given.yaml")
        folder = tmp_path / "run"
        folder.mkdir()
        folders.describe(folder, loaded)
        task = loaded.recipe.task
        if hasattr(task, "data"):
            data_report.write({"task.data": data_report.Found.of(Dataset(task.data))}, folder)
        return folder, loaded.recipe

    return begin


def test_it_is_what_the_row_of_the_ticket_has(begun: Any) -> None:
    folder, recipe = begun(DATA)
    row_of = train_rows(construct(recipe.task, seed=0), recipe.task, seed=recipe.run.seed)
    expected = lookup(folder)
    for ticket in (0, 7, 33):
        assert expected(ticket, row_of(ticket).id) == (row_of(ticket).answer, "")


def test_it_is_found_by_the_rows_id_where_rows_before_it_were_left_out(begun: Any) -> None:
    folder, recipe = begun(DATA)
    row_of = train_rows(construct(recipe.task, seed=0), recipe.task, seed=recipe.run.seed)
    expected = lookup(folder)
    assert expected(0, row_of(1).id) == (row_of(1).answer, "")
    assert expected(0, "questions.jsonl:99") == (None, "the recipe's task has no row questions.jsonl:99 now")


def test_rows_of_a_mixture_are_those_of_its_tasks(begun: Any) -> None:
    folder, recipe = begun(MIXTURE)
    row_of = train_rows(construct(recipe.task, seed=0), recipe.task, seed=recipe.run.seed)
    expected = lookup(folder)
    for ticket in range(4):
        row = row_of(ticket)
        assert row.id.startswith(("short/", "long/"))
        assert expected(ticket, row.id) == (row.answer, "")


@pytest.mark.parametrize("change", ["an answer", "a prompt", "gone", "no record of it"])
def test_data_that_is_other_than_it_was_is_not_believed(begun: Any, change: str) -> None:
    folder, recipe = begun(DATA)
    row_id = train_rows(construct(recipe.task, seed=0), recipe.task, seed=recipe.run.seed)(0).id
    assert lookup(folder)(0, row_id)[0] is not None, "the control"
    data, text = Path("questions.jsonl"), Path("questions.jsonl").read_text()
    later = (folder / "recipe.yaml").stat().st_mtime + 10
    if change == "an answer":
        data.write_text(text.replace('"answer": "', '"answer": "9'))
        os.utime(data, (later, later))
        said = "questions.jsonl was written after the run began"
    elif change == "a prompt":
        data.write_text(text.replace(" + 1", " + 2"))
        os.utime(data, (later - 100, later - 100))  # as a copy that keeps its time
        said = "its data is other than the run began with"
    elif change == "gone":
        data.unlink()
        said = "questions.jsonl"
    else:
        (folder / data_report.DOCUMENT).unlink()
        said = "its data is other than the run began with"
    answer, why = lookup(folder)(0, row_id)
    assert answer is None
    assert said in why
    assert "\n" not in why


def test_a_task_of_the_users_own_is_not_run_to_look_at_answers(begun: Any) -> None:
    """Its module would be imported, with whatever lies beside the run."""
    folder, _ = begun(OWN)
    Path("own_task_never_run.py").write_text("raise SystemExit('it was run')\n")
    answer, why = lookup(folder)(0, "train-0")
    assert (answer, why) == (None, "task.type own_task_never_run:Task is code, which is not run to look at answers")
    assert "own_task_never_run" not in sys.modules


def test_a_folder_whose_recipe_cannot_be_read_says_so(tmp_path: Path) -> None:
    answer, why = lookup(tmp_path)(0, "train-0")
    assert answer is None
    assert "recipe.yaml" in why
