"""Questions and answers from files: rows, splits, conversation and score."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.config.recipe import DataSource, SingleTurnTask
from asyncrl.config.rewards import Exact, Length
from asyncrl.data.errors import DataError
from asyncrl.rewards.exact import ExactMatch
from asyncrl.tasks.base import Answer, Row
from asyncrl.tasks.build import build_task, shuffled
from asyncrl.tasks.single_turn import SingleTurn


def write(path: Path, count: int, first: int = 0) -> str:
    rows = ({"question": f"{n}+1?", "gold": n + 1, "level": n % 3} for n in range(first, first + count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(train: str, heldout: str | None = None, **more: object) -> SingleTurnTask:
    data = DataSource(train=train, heldout=heldout, prompt="question", answer="gold")
    return SingleTurnTask(type="single-turn", data=data, **more)  # type: ignore[arg-type]


def test_one_file_is_split_and_rows_are_named_by_file_and_line(tmp_path: Path) -> None:
    task = build_task(config(write(tmp_path / "all.jsonl", 200)), seed=0)
    train, heldout = task.rows("train"), task.rows("heldout")
    assert len(train) + len(heldout) == 200
    assert 5 <= len(heldout) <= 40
    assert len({row.id for row in [*train, *heldout]}) == 200
    row = train[0]
    number = int(row.id.removeprefix("all.jsonl:"))
    assert row == Row(row.id, f"{number - 1}+1?", str(number), {"level": (number - 1) % 3})


def test_a_held_out_file_is_used_whole(tmp_path: Path) -> None:
    train, test = write(tmp_path / "train.jsonl", 20), write(tmp_path / "test.jsonl", 3, first=100)
    task = build_task(config(train, test), seed=0)
    assert (len(task.rows("train")), [row.id for row in task.rows("heldout")]) == (
        20,
        ["test.jsonl:1", "test.jsonl:2", "test.jsonl:3"],
    )
    assert isinstance(task, SingleTurn)
    assert not task.dataset.warnings


def test_prompts_in_both_files_are_reported(tmp_path: Path) -> None:
    train, test = write(tmp_path / "train.jsonl", 20), write(tmp_path / "test.jsonl", 3, first=18)
    task = build_task(config(train, test), seed=0)
    assert isinstance(task, SingleTurn)
    (warning,) = task.dataset.warnings
    assert f"held-out prompts of {test} that also occur in {train}: 2, as {train}:19" in warning


def test_the_system_prompt_goes_before_the_question(tmp_path: Path) -> None:
    task = SingleTurn(config(write(tmp_path / "a.jsonl", 9), system_prompt="Be brief."))
    assert task.messages(Row("1", "2+2?", "4")) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
    ]


@pytest.mark.parametrize(
    ("text", "finish_reason", "expected"),
    [(" 4\n", "stop", 1.0), ("4", "length", 0.0), ("4.", "stop", 0.0), ("", "stop", 0.0)],
)
def test_white_space_around_an_answer_does_not_count_but_its_end_does(
    text: str, finish_reason: str, expected: float
) -> None:
    found = ExactMatch(Exact()).verify({"id": "1", "answer": "4 "}, {"text": text, "finish_reason": finish_reason})
    assert found.parts == {"exact": expected}
    assert found.wrong == ("" if expected else "cut_off" if finish_reason == "length" else "wrong_answer")


def test_no_file_is_read_for_a_score_and_what_is_right_is_left_to_the_recipes_verifiers() -> None:
    task = SingleTurn(config("no-such-file.jsonl", rewards=[Exact(weight=2.5), Length(target_tokens=9)]))
    assert (task.score(Row("1", "2+2?", "4 "), Answer("4", (), "stop")), task.part_weights()) == ({}, {})


def test_a_bad_file_fails_when_the_task_is_built(tmp_path: Path) -> None:
    good = write(tmp_path / "a.jsonl", 20)
    with pytest.raises(DataError, match=r"none\.jsonl does not exist"):
        build_task(config("none.jsonl"), seed=0)
    (tmp_path / "bad.jsonl").write_text('{"question": "1?", "gold": 1}\n{"question": "2?"}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl:2: no column 'gold'; the row has 'question'"):
        build_task(config(good, str(tmp_path / "bad.jsonl")), seed=0)


def test_file_order_is_kept_only_where_the_recipe_says_so() -> None:
    assert shuffled(config("a.jsonl"))
    assert not shuffled(SingleTurnTask(type="single-turn", data=DataSource(train="a.jsonl", shuffle=False)))
