"""Every format gives the same rows; what is wrong with a file or a row of it is said by name."""

from __future__ import annotations

import bz2
import csv
import datetime
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.errors import DataError
from asyncrl.data.files import open_files
from tests.data.conftest import everything, opened

SAVED = Path(__file__).parent / "saved"
"""Written by `DatasetDict.save_to_disk` of `datasets` 5.2.0: train in two files, test in one."""

ROWS = [{"prompt": f"{n} + 1?", "answer": str(n + 1), "level": str(n % 3)} for n in range(20)]


def jsonl(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def as_json(path: Path) -> Path:
    path.write_text(json.dumps(ROWS, indent=1))
    return path


def as_csv(path: Path) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "answer", "level"])
        writer.writeheader()
        writer.writerows(ROWS)
    return path


def as_parquet(path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=7)
    return path


def as_arrow(path: Path) -> Path:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=6)
    return path


def compressed(compress: Callable[[bytes], bytes]) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        plain = jsonl(path.with_suffix(".tmp")).read_bytes()
        path.write_bytes(compress(plain[:500]) + compress(plain[500:]))  # in two members, as logs are appended
        return path

    return write


WRITTEN: dict[str, Callable[[Path], Path]] = {
    "a.jsonl": jsonl,
    "a.ndjson": jsonl,
    "a.json": as_json,
    "lines.json": jsonl,
    "a.csv": as_csv,
    "A.CSV": as_csv,
    "a.parquet": as_parquet,
    "a.arrow": as_arrow,
    "a.jsonl.gz": compressed(gzip.compress),
    "a.jsonl.bz2": compressed(bz2.compress),
    "a.jsonl.zst": compressed(lambda data: pa.Codec("zstd").compress(data, asbytes=True)),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_all_formats_give_the_same_rows_on_the_same_sides(tmp_path: Path, name: str) -> None:
    dataset = opened(WRITTEN[name](tmp_path / name))
    expected = opened(jsonl(tmp_path / "expected.jsonl"))
    for side, other in ((dataset.train, expected.train), (dataset.heldout, expected.heldout)):
        assert [(row.prompt, row.answer, row.info) for row in side] == [(r.prompt, r.answer, r.info) for r in other]
        assert [row.id.rpartition(":")[2] for row in side] == [row.id.rpartition(":")[2] for row in other]
    assert all(row.id.startswith(f"{name}:") for row in dataset.train)


def test_a_dataset_of_hugging_faces_is_read_from_its_folder() -> None:
    dataset = opened(SAVED / "train", heldout=SAVED / "test", prompt="chat", answer="gold")
    assert (len(dataset.train), len(dataset.heldout)) == (40, 10)
    assert [row.id for row in dataset.train[:2]] == ["train:1", "train:2"]
    row = dataset.train[21]  # in the second file
    assert (row.prompt, row.answer) == ([{"role": "user", "content": "21 + 1?"}], "22")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert row.info["tools"] == [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    assert "tools" not in dataset.train[20].info
    left_out = "columns that hold no text, numbers, lists or objects are left out: seen (timestamp[us])"
    assert dataset.warnings == [f"{SAVED / split}: {left_out}" for split in ("train", "test")]


def test_a_folder_with_splits_names_them() -> None:
    with pytest.raises(DataError, match=r"has the splits train, test: name one, as in .*/train,"):
        opened(SAVED)


def test_files_patterns_and_folders_are_one_sequence_in_the_order_of_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    for n in range(3):
        jsonl(folder / f"part-{n}.jsonl", ROWS[n * 5 : n * 5 + 5])
    (folder / "README.md").write_text("not rows")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    jsonl(tmp_path / "deep" / "er" / "part-0.jsonl", ROWS[15:])
    whole = [*folder.glob("*.jsonl")]
    for named in (folder, folder / "*.jsonl", sorted(whole)):
        assert [row.prompt for row in everything(opened(named))] == [row["prompt"] for row in ROWS[:15]]
    mixed = opened([tmp_path / "deep" / "**" / "*.jsonl", folder / "part-0.jsonl"])
    ids = {row.id for row in everything(mixed)}
    assert ids == {f"{name}/part-0.jsonl:{n}" for name in ("deep/er", "parts") for n in range(1, 6)}
    with pytest.raises(DataError, match=r"names .*part-0\.jsonl twice"):
        opened([folder, folder / "part-0.jsonl"])


def test_a_column_that_the_first_row_lacks_is_kept_of_the_others(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2", "tools": [CALL], "more": {"x": None}}]
    file = tmp_path / "a.json"
    file.write_text(json.dumps(rows))
    first, second = everything(opened(file))
    assert (first.info, second.info) == ({}, {"more": {"x": None}, "tools": [CALL]})


CALL = {"type": "function", "function": {"name": "pay", "parameters": {"properties": {"sum": {"type": "number"}}}}}


@pytest.mark.parametrize("value", [[CALL], json.dumps([CALL])])
def test_tools_are_a_list_or_that_list_as_text(tmp_path: Path, value: object) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"prompt": p, "answer": "1", "functions": value} for p in "ab"])
    assert [row.info for row in everything(opened(file, tools="functions"))] == [{"tools": [CALL]}] * 2


def test_tools_of_columnar_files_lose_the_keys_that_only_others_have(tmp_path: Path) -> None:
    other = {"type": "function", "function": {"name": "ask", "strict": True}}
    table = pa.Table.from_pylist([{"prompt": p, "answer": "1", "tools": [t]} for p, t in (("a", CALL), ("b", other))])
    assert table["tools"][0].as_py()[0]["function"]["strict"] is None
    pq.write_table(table, tmp_path / "a.parquet")
    assert [row.info["tools"] for row in everything(opened(tmp_path / "a.parquet"))] == [[CALL], [other]]


@pytest.mark.parametrize("value", ["hammer", "[1]", '"x"', 3, {"type": "function"}, [{"name": "pay"}], [[]]])
def test_a_tools_column_that_is_something_else_is_named(tmp_path: Path, value: object) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "answer": "1", "tools": value}])
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*column 'tools'"):
        opened(file)


def test_an_own_id_names_the_row(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"prompt": str(n), "answer": "1", "uid": n} for n in range(5)])
    assert [row.id for row in everything(opened(file, id="uid"))] == ["0", "1", "2", "3", "4"]
    jsonl(file, [{"prompt": str(n), "answer": "1", "uid": f"u{n % 3}"} for n in range(5)])
    with pytest.raises(DataError, match=r"a\.jsonl:4: an earlier row has the id 'u0'"):
        opened(file, id="uid")
    dataset = opened(file, id="uid", bad_rows="skip")
    assert len(everything(dataset)) == 3
    assert dataset.document()["read"]["train"]["left_out"]["same-id"]["rows"] == 2
    jsonl(file, [{"prompt": "a", "answer": "1", "uid": None}])
    with pytest.raises(DataError, match=r"a\.jsonl:1: the id \(column 'uid'\) is null"):
        opened(file, id="uid")


def test_rows_without_answers_are_read_where_the_recipe_names_no_column(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"prompt": p} for p in "abc"])
    assert [row.answer for row in everything(opened(file, answer=None))] == [None] * 3


def test_columns_that_hold_no_json_are_left_out_by_name(tmp_path: Path) -> None:
    when = [datetime.datetime(2026, 1, 1)] * 2
    columns = {"prompt": ["a", "b"], "answer": [1, 2], "when": when, "image": [b"\xff"] * 2, "x": [{"y": b""}] * 2}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    dataset = opened(tmp_path / "a.parquet")
    assert [row.info for row in everything(dataset)] == [{}, {}]
    assert all(name in dataset.warnings[0] for name in ("when (timestamp", "image (binary)", "x (struct<y: binary>)"))
    with pytest.raises(DataError, match=r"a\.parquet:1: no column 'when'"):
        opened(tmp_path / "a.parquet", answer="when")


# --- CSV --------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(*[st.text(alphabet='ab,"\n é', min_size=1)] * 2).filter(lambda p: all(s.strip() for s in p))))
def test_what_csv_writes_is_read_back(tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]) -> None:
    path = tmp_path_factory.mktemp("written") / "rows.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("prompt", "answer"), *pairs])
    files = open_files(str(path), "auto", key="train")
    assert [tuple(files.read(n)[2].values()) for n in range(len(files))] == pairs


BAD_CSV = {
    b"": r"a\.csv is empty",
    b"prompt,answer\n": r"a\.csv is empty: it needs at least one row",
    b"prompt,prompt\n1,2\n": r"header has 'prompt' twice",
    b"prompt;answer\n1;2\n": r"a\.csv:1: no column 'prompt'; the row has 'prompt;answer'",
    b"prompt,answer\n1,2\n1,2,3\n": r"a\.csv:2: 3 cells, but the header names 2",
    b"prompt,answer\n1\n": r"a\.csv:1: 1 cells",
    b"prompt,answer\n1,\n": r"a\.csv:1: the answer \(column 'answer'\) is empty",
    b'prompt,answer\n1,2\n"1"x,2\n': r"a\.csv:2: not CSV",
    b'prompt,answer\n1,2\n1,"2\n3,4\n': r"a\.csv:2: not CSV: unexpected end",
    b'prompt,answer\n5" pipe,2\n3,4\n': r"a\.csv:1: not CSV",
    b"prompt,answer\n1,\xff\n": r"a\.csv:1: not UTF-8",
    b"prompt,\xffanswer\n1,2\n": r"a\.csv:header: not UTF-8",
}


@pytest.mark.parametrize(("content", "message"), BAD_CSV.items())
def test_a_bad_csv_file_is_refused_with_place_and_fix(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        opened(tmp_path / "a.csv")
    assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_mark_windows_line_ends_and_blank_lines_are_harmless(tmp_path: Path, end: str) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + end.join(["prompt,answer", '"a', '"', ",1", "", "b,2"]).encode())
    (tmp_path / "b.csv").write_bytes(b"\xef\xbb\xbf" + end.join(["prompt,answer", "a,1", "", "b,2", ""]).encode())
    assert [(r.id, r.prompt, r.answer) for r in everything(opened(tmp_path / "b.csv"))] == [
        ("b.csv:1", "a", "1"),
        ("b.csv:2", "b", "2"),
    ]
    lines = [json.dumps(row) for row in ROWS[:3]]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + end.join(["", lines[0], " ", lines[1], lines[2]]).encode())
    assert [(row.id, row.prompt) for row in everything(opened(tmp_path / "a.jsonl"))] == [
        ("a.jsonl:2", "0 + 1?"),
        ("a.jsonl:4", "1 + 1?"),
        ("a.jsonl:5", "2 + 1?"),
    ]


# --- JSON, and what is not what it is called --------------------------------------------------------------------------

BAD_FILES = {
    "list.json": (
        b'[{"prompt": "a", "answer": "1"}, {"prompt": "b" "answer": "1"}]',
        r"no JSON list .*\(row 2, line 1\)",
    ),
    "open.json": (b'[{"prompt": "a", "answer": "1"}', r"no JSON list .*\(row 1, line 1\)"),
    "more.json": (b"[] []", r"something after the list"),
    "empty.json": (b"", r"no JSON list of objects \(at its start"),
    "none.json": (b"[]", r"none\.json is empty"),
    "value.json": (b"3", r"no JSON list"),
    "text.json": (b'[{"prompt": "a", "answer": "1"}, "x"]', r"text\.json:2: a string, not an object"),
    "twice.json": (b'[{"prompt": "a", "prompt": "b"}]', r"twice\.json:1: the key 'prompt' occurs twice"),
    "nan.json": (b'[{"prompt": "a", "answer": NaN}]', r"nan\.json:1: NaN is not JSON"),
    "deep.json": (b"[" * 100_000, r"deep\.json"),
    "wide.json": (b'[{"prompt": "a", "answer": 1e999}]', r"wide\.json:1: the number 1e999 is too large"),
    "a.parquet": (b"PAR1 not really", r"a\.parquet is no intact Parquet file"),
    "a.arrow": (b"ARROW1 not really", r"a\.arrow is no intact Arrow file"),
    "b.arrow": (b"", r"b\.arrow is no intact Arrow file"),
    "a.jsonl.gz": (b"not packed", r"a\.jsonl\.gz cannot be unpacked"),
    "cut.jsonl.gz": (gzip.compress(b'{"prompt": "a"}' * 99)[:-20], r"cut\.jsonl\.gz cannot be unpacked"),
    "rows.txt": (b"{}", r"its name ends in none of \.jsonl, .*task\.data\.format"),
    "wide.jsonl": ('{"prompt": "a"}'.encode("utf-16"), r"wide\.jsonl is UTF-16"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_not_what_it_is_called_is_refused_by_name(tmp_path: Path, name: str) -> None:
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        opened(tmp_path / name)
    assert len(str(caught.value).splitlines()) <= 3


def test_a_bad_row_of_a_json_list_is_left_out_alone(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(
        '[{"prompt": "a", "answer": "1"}, {"prompt": "b", "x": 1, "x": 2}, {"prompt": "c", "answer": "3"} ]'
    )
    assert [row.prompt for row in everything(opened(file, bad_rows="skip"))] == ["a", "c"]


def test_a_name_that_says_nothing_can_be_said(tmp_path: Path) -> None:
    assert len(everything(opened(as_csv(tmp_path / "rows.txt"), format="csv"))) == 20
    with pytest.raises(DataError, match=r"parquet file is compressed inside"):
        opened(compressed(gzip.compress)(tmp_path / "a.parquet.gz"), format="parquet")


def test_what_is_not_there_is_named_with_the_folder_that_was_searched(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "both").mkdir()
    jsonl(tmp_path / "both" / "a.jsonl")
    as_csv(tmp_path / "both" / "a.csv")
    for named, message in {
        "": r"task\.data\.train is '': name a file",
        "none.jsonl": r"none\.jsonl does not exist \(relative to /.*\): correct task\.data\.train",
        str(tmp_path / "*.jsonl"): r"matches no file",
        str(tmp_path / "none"): r"is a folder with no file, of \.jsonl",
        str(tmp_path / "both"): r"is a folder with files of the formats csv, jsonl",
    }.items():
        with pytest.raises(DataError, match=message):
            opened(named)


def test_one_file_under_two_names_is_refused(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to("a.jsonl")
    with pytest.raises(DataError, match=r"train names \S*a\.jsonl twice, also as \S*b\.jsonl: its rows would count"):
        opened(tmp_path / "*.jsonl")


def test_hidden_files_of_a_folder_are_none_of_its_data(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl")
    (tmp_path / "._a.jsonl").write_bytes(b"\x00\x05\x16\x07")
    assert len(everything(opened(tmp_path))) == len(ROWS)


@pytest.mark.timeout(60)
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"a\.jsonl is no file, but a pipe or a device, which can be read once"):
        opened(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["a.json.gz", "a.JSON.GZ", "a.json"])
def test_a_json_file_of_one_object_a_line_is_read_also_when_it_is_packed(tmp_path: Path, name: str) -> None:
    """As c4 is on its hub."""
    text = jsonl(tmp_path / "plain").read_bytes()
    (tmp_path / name).write_bytes(gzip.compress(text) if "z" in name.lower() else text)
    dataset = opened(tmp_path / name)
    assert len(everything(dataset)) == len(ROWS)
    assert dataset.document()["read"]["train"]["files"][0]["format"] == "jsonl"
    (tmp_path / "list.json.gz").write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    assert len(everything(opened(tmp_path / "list.json.gz"))) == len(ROWS)
    (tmp_path / "broken.json.gz").write_bytes(text)
    with pytest.raises(DataError, match=r"cannot be unpacked: .* it is damaged, or not what its name says"):
        opened(tmp_path / "broken.json.gz")


def test_a_user_who_says_nothing_asks_nothing(tmp_path: Path) -> None:
    blank = [{"role": "system", "content": "be brief"}, {"role": "user", "content": " \n"}]
    dataset = opened(jsonl(tmp_path / "a.jsonl", [*ROWS, {"prompt": blank, "answer": "1"}]), bad_rows="skip")
    assert dataset.document()["read"]["train"]["left_out"]["empty"]["rows"] == 1
    assert len(everything(dataset)) == len(ROWS)


def test_numbers_that_json_cannot_hold_are_null_in_columns_and_refused_in_json(tmp_path: Path) -> None:
    """Or a document of an evaluation by such a column could not be written."""
    numbers = [float("nan"), float("inf"), 0.5]
    inside = [{"a": [one]} for one in numbers]
    table = {"prompt": ["a", "b", "c"], "answer": ["1", "2", "3"], "level": numbers, "inside": inside}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    found = [dict(row.info) for row in everything(opened(tmp_path / "rows.parquet"))]
    assert found == [{"level": one, "inside": {"a": [one]}} for one in (None, None, 0.5)]
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "answer": "1", "level": 1e999}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:1: the number 1e999 is too large"):
        opened(tmp_path / "a.jsonl")


def test_a_file_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    """Or its rows have ids that no verifier's process can be sent: every answer would be unscored."""
    jsonl(tmp_path / os.fsdecode(b"caf\xe9.jsonl"))
    with pytest.raises(DataError, match=r"train: the name of a file is not UTF-8, '\S*/caf\\udce9\.jsonl': rename it"):
        opened(tmp_path)
