"""Files that are not those that a run began with are refused when it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.config.recipe import DataSource
from asyncrl.data.dataset import Dataset
from asyncrl.data.errors import DataError
from asyncrl.runtime.data_report import DOCUMENT, Found, write

ROWS = [(f"prompt {n}", f"{n}") for n in range(30)]


def look(folder: Path, rows: list[tuple[str, str]], **more: object) -> dict[str, Found]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows))
    return {"task.data": Found.of(Dataset(DataSource(train=str(path), **more)))}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([*ROWS, ("one more", "1")], "31 rows now, 30 then"),
        (ROWS[:-1], "29 rows now, 30 then"),
        (ROWS[::-1], "30 rows now, 30 then"),
        ([("another prompt", "0"), *ROWS[1:]], "30 rows now, 30 then"),
    ],
)
def test_other_prompts_or_another_order_are_refused(rows: list[tuple[str, str]], said: str, tmp_path: Path) -> None:
    write(look(tmp_path, ROWS), tmp_path)
    kept = (tmp_path / DOCUMENT).read_bytes()
    with pytest.raises(DataError, match=rf"task\.data\.train has other prompts than the run began with: {said}"):
        write(look(tmp_path, rows), tmp_path)
    assert (tmp_path / DOCUMENT).read_bytes() == kept, "what it began with is kept"


def test_the_same_prompts_with_corrected_answers_are_not(tmp_path: Path) -> None:
    write(look(tmp_path, ROWS), tmp_path)
    write(look(tmp_path, [(prompt, f"={answer}") for prompt, answer in ROWS]), tmp_path)


def test_where_repeated_rows_are_left_out_an_answer_that_makes_one_is_a_change(tmp_path: Path) -> None:
    twice = [*ROWS, ("prompt 3", "4")]
    write(look(tmp_path, twice, duplicates="drop"), tmp_path)
    with pytest.raises(DataError, match="other prompts"):
        write(look(tmp_path, [*ROWS, ("prompt 3", "3")], duplicates="drop"), tmp_path)


def test_a_run_of_an_older_version_kept_no_digests_and_goes_on(tmp_path: Path) -> None:
    write(look(tmp_path, ROWS), tmp_path)
    document = json.loads((tmp_path / DOCUMENT).read_bytes())
    del document["task.data"]["read"]["train"]["digest"]
    (tmp_path / DOCUMENT).write_text(json.dumps(document))
    write(look(tmp_path, ROWS[::-1]), tmp_path)
