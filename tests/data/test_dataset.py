"""What becomes of rows that repeat, contradict, leak or cannot be used; and of files that are very large."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data import content, examined, places
from asyncrl.data.bad_rows import BadRows
from asyncrl.data.content import Held
from asyncrl.data.errors import DataError, RowError
from asyncrl.data.files import open_files
from asyncrl.data.kept import _forget_outdated, kept
from asyncrl.data.repeated import repeated_and_contradicting
from asyncrl.data.rows import Record
from asyncrl.data.split import HELDOUT_SHARE, prompt_key
from tests.data.conftest import everything, opened


def rows(path: Path, *pairs: tuple[object, object]) -> Path:
    path.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in pairs))
    return path


def numbered(path: Path, count: int, first: int = 0) -> Path:
    return rows(path, *((f"question {n}", str(n)) for n in range(first, first + count)))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "train.jsonl"


# --- policies ---------------------------------------------------------------------------------------------------------


def test_rows_that_cannot_be_used_end_the_reading_or_are_left_out_and_counted(file: Path) -> None:
    rows(file, ("a", "1"), (None, "2"), ("b", None), ("", "3"), ("c", 4), ("d��", "5"), ("e", "6"))
    with pytest.raises(DataError, match=r"train\.jsonl:2: .* is null.*\n.*task\.data\.bad_rows=skip"):
        opened(file)
    dataset = opened(file, bad_rows="skip")
    assert [row.prompt for row in everything(dataset)] == ["a", "c", "e"]
    left_out = dataset.document()["read"]["train"]["left_out"]
    assert {reason: found["rows"] for reason, found in left_out.items()} == {"null": 2, "empty": 1, "not-text": 1}
    assert left_out["null"]["first"].startswith(f"{file}:2: ")
    assert [warning.split(": ")[0] for warning in dataset.warnings] == [
        "left out (null)",
        "left out (empty)",
        "left out (not-text)",
    ]
    assert "left out: 4" in dataset.line()
    json.dumps(dataset.document(), allow_nan=False)


def test_one_replacement_character_may_be_meant(file: Path) -> None:
    assert len(everything(opened(rows(file, ("what is �?", "a sign"), ("b", "2"))))) == 2


def test_a_file_in_which_every_row_is_left_out_is_refused(file: Path) -> None:
    with pytest.raises(DataError, match=r"has no usable row \(2 rows left out: null 2\)"):
        opened(rows(file, (None, "1"), (None, "2")), bad_rows="skip")


def test_rows_that_repeat_are_kept_dropped_or_refused(file: Path) -> None:
    rows(file, ("a", "1"), ("b", "1"), ("a ", "1"), ("a", "1"), ("b", "2"))
    kept_rows = opened(file)
    assert len(everything(kept_rows)) == 5
    assert f"rows with prompt and answer of an earlier one: 2, as {file}:3 of {file}:1" in "".join(kept_rows.warnings)
    assert [row.id for row in everything(opened(file, duplicates="drop"))] == [
        "train.jsonl:1",
        "train.jsonl:2",
        "train.jsonl:5",
    ]
    with pytest.raises(
        DataError, match=r"earlier one: 2, .*; remove them, or have it done: task\.data\.duplicates=drop"
    ):
        opened(file, duplicates="error")


def test_prompts_with_several_answers_are_named(file: Path) -> None:
    rows(file, ("a", "1"), ("b", "1"), ("a", "2"), ("b", "1"), ("a", "3"))
    dataset = opened(file)
    assert re.search(r"prompts with several answers: 1, as .*jsonl:[13] and .*jsonl:[35];", "".join(dataset.warnings))
    assert dataset.document()["read"]["train"]["contradictory"] == 1


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=30))
def test_repeats_and_contradictions_are_those_that_a_dictionary_finds(pairs: list[tuple[int, int]]) -> None:
    first: dict[tuple[int, int], int] = {}
    repeated, answers = [], dict[int, set[int]]()
    for position, pair in enumerate(pairs):
        if pair in first:
            repeated.append([first[pair], position])
        first.setdefault(pair, position)
        answers.setdefault(pair[0], set()).add(pair[1])
    columns = (np.array([pair[n] for pair in pairs], np.uint64) for n in (0, 1))
    found, differing = repeated_and_contradicting(np.arange(len(pairs)), *columns)
    assert found.tolist() == repeated
    assert sorted(pairs[one][0] for one, _ in differing.tolist()) == sorted(p for p, a in answers.items() if len(a) > 1)
    assert all(pairs[one][0] == pairs[other][0] and pairs[one] != pairs[other] for one, other in differing.tolist())


def test_prompts_that_are_also_held_out_are_reported_dropped_or_refused(tmp_path: Path) -> None:
    train, heldout = numbered(tmp_path / "train.jsonl", 10), numbered(tmp_path / "test.jsonl", 4, first=8)
    said = f"held-out prompts of {heldout} that also occur in {train}: 2, as {train}:9"
    warned = opened(train, heldout=heldout)
    assert (len(warned.train), len(warned.heldout)) == (10, 4)
    assert said in warned.warnings[0]
    dropped = opened(train, heldout=heldout, leaks="drop")
    assert (len(dropped.train), len(dropped.heldout)) == (8, 4)
    assert not {row.prompt for row in dropped.train} & {row.prompt for row in dropped.heldout}
    assert "left out there: 2 rows" in dropped.warnings[0]
    with pytest.raises(DataError, match=r"task\.data\.leaks=drop"):
        opened(train, heldout=heldout, leaks="error")
    with pytest.raises(DataError, match=r"no row is left to train"):
        opened(heldout, heldout=heldout, leaks="drop")


# --- where rows begin -------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([b"{}", b"\n", b"\r\n", b"  ", b"\t{} ", b'"x"', b"\xef\xbb\xbf"]), max_size=40))
def test_rows_begin_where_lines_do_whatever_the_block(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    text = data.removeprefix(b"\xef\xbb\xbf")
    expected = [(n, line) for n, line in enumerate(text.split(b"\n"), start=1) if line.strip()]
    with pytest.MonkeyPatch.context() as patch:
        for block in (1, 3, 1 << 20):
            patch.setattr(places, "BLOCK", block)
            found = places.find_places(Path("a"), Held(data), quoted=False)
            lines = [(found.number(n), data[slice(*found.span(n))].strip()) for n in range(len(found))]
            assert lines == [(n, line.strip()) for n, line in expected]


# --- large files ------------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is treated as a large one."""
    monkeypatch.setattr(content, "SMALL", 0)
    monkeypatch.setattr(examined, "WORTH_KEEPING", 0)


FORMATS = ["jsonl", "csv", "parquet", "jsonl.gz"]


def in_format(folder: Path, form: str, count: int) -> Path:
    table = [{"prompt": f"question {n}", "answer": str(n)} for n in range(count)]
    path = folder / f"rows.{form}"
    lines = "".join(json.dumps(row) + "\n" for row in table)
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(table), path)
    elif form == "csv":
        path.write_text("prompt,answer\n" + "".join(f"{row['prompt']},{row['answer']}\n" for row in table))
    elif form == "jsonl":
        path.write_text(lines)
    else:
        with pa.output_stream(str(path), compression="gzip") as stream:
            stream.write(lines.encode())
    return path


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.usefixtures("nothing_is_small")
def test_a_large_file_gives_the_rows_of_a_small_one_and_is_looked_at_once(
    tmp_path: Path, cache: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = in_format(tmp_path, form, 300)
    first = opened(path)
    assert sum(1 for folder in cache.iterdir() if folder.is_dir()) >= 1
    monkeypatch.setattr(examined, "_look", None)  # is not asked again
    again = opened(path)
    assert everything(again) == everything(first)
    assert [row.prompt for row in first.heldout] == [
        f"question {n}" for n in range(300) if prompt_key(f"question {n}") % HELDOUT_SHARE == 0
    ]
    assert not list(cache.glob(".*.making"))


@pytest.mark.usefixtures("nothing_is_small")
def test_what_was_left_out_is_said_again_by_who_only_finds_it(file: Path) -> None:
    rows(file, *((f"question {n}", str(n)) for n in range(50)), (None, "x"))
    first, again = opened(file, bad_rows="skip"), opened(file, bad_rows="skip")
    assert again.warnings == first.warnings
    assert again.document() == first.document()
    with pytest.raises(DataError, match=r"train\.jsonl:51"):
        opened(file)


@pytest.mark.usefixtures("nothing_is_small")
def test_a_file_that_was_changed_is_looked_at_anew_and_what_was_kept_of_it_goes(file: Path, cache: Path) -> None:
    numbered(file, 60)
    dataset = opened(file)
    before = {folder.name for folder in cache.iterdir() if folder.is_dir()}
    _forget_outdated.cache_clear()  # as in the process of a later run
    numbered(file, 80)
    with pytest.raises(DataError, match=r"train\.jsonl was changed while it was in use"):
        dataset.train[3]
    assert len(everything(opened(file))) == 80
    assert not before & {folder.name for folder in cache.iterdir() if folder.is_dir()}


@pytest.mark.usefixtures("nothing_is_small")
def test_a_file_that_took_the_place_of_another_is_the_one_that_is_read(file: Path, tmp_path: Path) -> None:
    numbered(file, 60)
    opened(file)
    numbered(tmp_path / "new.jsonl", 60, first=1000).replace(file)
    assert everything(opened(file))[0].prompt == "question 1000"


@pytest.mark.usefixtures("nothing_is_small")
def test_more_files_than_can_be_open_are_read(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for n in range(200):
        numbered(tmp_path / f"{n:03}.jsonl", 2, first=2 * n)
    open_now = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 150, hard))
    try:
        dataset = opened(tmp_path / "*.jsonl")
        assert len(everything(dataset)) == len(everything(dataset)) == 400
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_cannot_be_kept_says_where_and_what_to_do(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbered(file, 3)
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path / "taken"))
    with pytest.raises(DataError, match=r"cannot be kept in .*taken/data .*set ASYNCRL_CACHE"):
        kept([file], "what", lambda folder: None)


def test_what_was_begun_and_not_finished_is_made_anew(file: Path, cache: Path) -> None:
    numbered(file, 3)

    def fails(folder: Path) -> None:
        (folder / "half").write_text("")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        kept([file], "what", fails)
    assert {path.name for path in kept([file], "what", lambda folder: None).iterdir()} == {"source.json", "sizes.json"}


def test_of_very_many_rows_the_first_are_looked_at_and_the_others_when_they_are_read(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examined, "ALL_ROWS", 400)
    monkeypatch.setattr(examined, "FIRST_ROWS", 200)
    held = next(n for n in range(200) if prompt_key(f"question {n}") % HELDOUT_SHARE == 0)
    later = [("good", "1"), (None, "2"), (f"question  {held}", "3")]
    rows(file, *((f"question {n}", str(n)) for n in range(398)), *later)
    dataset = opened(file)
    assert len(dataset.train) + len(dataset.heldout) == 401
    assert dataset.document()["read"]["train"]["unseen"] == 201
    assert "looked at when they are read: 201" in dataset.line()
    assert dataset.train[-3].prompt == "good"
    for index, reason in ((-2, "null"), (-1, "held-out")):
        with pytest.raises(RowError) as caught:
            dataset.train[index]
        assert caught.value.reason == reason
    usable = [dataset.train[n].prompt for n in range(len(dataset.train) - 2)]
    assert not {*usable} & {row.prompt for row in dataset.heldout}
    assert all(row.id in {f"train.jsonl:{n}" for n in range(1, 201)} for row in dataset.heldout)


@pytest.mark.parametrize("policy", ["drop", "error"])
def test_a_leak_far_behind_is_found_when_the_row_is_read(
    tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examined, "ALL_ROWS", 20)
    monkeypatch.setattr(examined, "FIRST_ROWS", 10)
    train, heldout = numbered(tmp_path / "train.jsonl", 50), numbered(tmp_path / "test.jsonl", 1, first=40)
    with pytest.raises(RowError, match=r"train\.jsonl:41: its prompt is also held out"):
        opened(train, heldout=heldout, leaks=policy).train[40]
    assert opened(train, heldout=heldout).train[40].prompt == "question 40"


@pytest.mark.parametrize("in_memory", [False, True], ids=["guarded", "control"])
def test_a_line_of_a_hundred_megabytes_is_named_and_never_read(
    file: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    with file.open("wb") as lines:
        lines.write(b'{"prompt": "a", "answer": "1"}\n{"prompt": "')
        lines.writelines([b"x" * (1 << 20)] * 100)
        lines.write(b'", "answer": "2"}\n{"prompt": "b", "answer": "3"}\n')
    if in_memory:
        monkeypatch.setattr(content, "SMALL", 1 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"train\.jsonl:2: the row has 104,857,\d{3} bytes, and 33,554"):
            opened(file)
        dataset = opened(file, bad_rows="skip")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [row.prompt for row in everything(dataset)] == ["a", "b"]
    assert dataset.document()["read"]["train"]["left_out"].keys() == {"too-large"}
    assert (peak > 100 << 20) == in_memory  # the control shows that the limit would see it


def test_two_processes_that_open_a_large_file_at_once_look_at_it_once(tmp_path: Path, cache: Path) -> None:
    path = numbered(tmp_path / "rows.jsonl", examined.WORTH_KEEPING + 1)
    code = (
        "import logging, sys; logging.basicConfig(level=logging.INFO)\n"
        "from asyncrl.config.recipe import DataSource\n"
        "from asyncrl.data.dataset import Dataset\n"
        "print(len(Dataset(DataSource(train=sys.argv[1])).train))\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ.copy())
        for _ in range(2)
    ]
    said = [process.communicate(timeout=100) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert said[0][0] == said[1][0]
    assert sum(stderr.count("looking at 20001 rows") for _, stderr in said) == 1
    assert len([folder for folder in cache.iterdir() if folder.is_dir()]) == 1


def test_reading_in_order_tells_of_each_bad_row_once(file: Path) -> None:
    rows(file, ("a", "1"), (None, "2"), ("b", "3"))
    bad = BadRows("skip", key="k")
    files = open_files(str(file), "auto", key="train")

    def parse(where: str, own_id: str, row: dict[str, Any]) -> str:
        if row["prompt"] is None:
            raise RowError("null", where)
        return own_id

    assert [*files.parsed(parse, bad, first=3)] == [(0, "train.jsonl:1"), (2, "train.jsonl:3")]
    assert bad.by_reason == {"null": 1}


@pytest.mark.parametrize("form", ["jsonl", "parquet", "json"])
def test_many_small_files_are_not_held_in_memory_together(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """A data set in a thousand shards of 30 MB would be 30 GB in every process."""
    for n in range(12):
        table = [{"prompt": f"question {n} {m}" + "x" * 5000, "answer": str(m)} for m in range(160)]
        if form == "parquet":
            pq.write_table(pa.Table.from_pylist(table), tmp_path / f"{n:02d}.parquet")
        else:
            lines = json.dumps(table) if form == "json" else "\n".join(map(json.dumps, table))
            (tmp_path / f"{n:02d}.{form}").write_text(lines)

    def held() -> tuple[int, list[Record]]:
        tracemalloc.start()
        before = pa.total_allocated_bytes()
        try:
            dataset = opened(tmp_path / f"*.{form}")
            size = pa.total_allocated_bytes() - before + tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        return size, everything(dataset)

    whole, rows = held()
    monkeypatch.setattr(content, "SMALL", 2_000_000)
    part, same = held()
    assert rows == same
    assert len(rows) == 1920
    assert part < 6_000_000 < 9_000_000 < whole  # an interpreter's own table may grow by two meanwhile
