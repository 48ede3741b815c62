"""Rows of JSONL: what is read, what is refused and how it is said."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.bad_rows import BadRows
from asyncrl.data.errors import DataError
from asyncrl.data.examined import examine
from asyncrl.data.files import open_files
from asyncrl.data.rows import Columns, Record

GOOD = b'{"prompt": "p", "answer": "a"}\n'


def columns(prompt: str = "prompt", answer: str | None = "answer", own_id: str | None = None) -> Columns:
    return Columns(prompt, answer, own_id, "tools", "task.data")


def records(path: Path, by: Columns) -> list[Record]:
    files = open_files(str(path), "auto", key="task.data.train")
    found = examine(files, by, BadRows("error", key="task.data.bad_rows"))
    return [by.record(*files.read(n)) for n in found.positions.tolist()]


def read(path: Path, content: bytes, by: Columns | None = None) -> list[Record]:
    path.write_bytes(content)
    return records(path, by or columns())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "train.jsonl"


def test_columns_are_mapped_and_the_others_are_kept(file: Path) -> None:
    file.write_text(
        '{"problem": "2+2", "solution": 4, "source": {"book": 1}}\n\n{"problem": "Größe 😀", "solution": "\\u00fc"}'
    )
    first, second = records(file, columns("problem", "solution"))
    assert first == Record("train.jsonl:1", "2+2", "4", {"source": {"book": 1}})
    assert second == Record("train.jsonl:3", "Größe 😀", "ü", {})


def test_messages_are_a_prompt_and_windows_line_ends_are_harmless(file: Path) -> None:
    (record,) = read(file, b'{"prompt": [{"role": "user", "content": "hi", "id": 3}], "answer": "a"}\r\n')
    assert record.prompt == [{"role": "user", "content": "hi"}]


def test_a_line_separator_inside_a_string_does_not_end_the_row(file: Path) -> None:
    (record,) = read(file, '{"prompt": "a\u2028b", "answer": "c"}\n'.encode())
    assert record.prompt == "a\u2028b"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"train\.jsonl is empty: it needs at least one row with the columns 'prompt' and 'answer'"),
        (b"\n \n", r"train\.jsonl is empty"),
        (GOOD + b'{"prompt": "p", "answer"\n', r"train\.jsonl:2: not JSON: .* at character \d+"),
        (GOOD + b'{"prompt": "p", "answer": "a",}\n', r"train\.jsonl:2: not JSON"),
        (
            GOOD * 2 + b'{"question": "p", "answer": "a"}',
            r":3: no column 'prompt'; the row has 'question', 'answer'\.\n",
        ),
        (GOOD + b'{"prompt": "p", "solution": "a"}', r":2: no column 'answer'; .*\n.*task\.data\.answer"),
        (b"{}", r":1: no column 'prompt'; the row has none"),
        (b'{"prompt": "p", "answer": null}', r":1: the answer \(column 'answer'\) is null"),
        (b'{"prompt": "p", "answer": " "}', r":1: the answer \(column 'answer'\) is empty"),
        (b'{"prompt": "p", "answer": 1.5}', r":1: the answer .* is a number 1\.5: write it as a string"),
        (b'{"prompt": "p", "answer": true}', r":1: the answer .* is a boolean true"),
        (b'{"prompt": "p", "answer": ["a"]}', r':1: the answer .* is a list \["a"\]'),
        (b'{"prompt": "", "answer": "a"}', r":1: the prompt .* is empty"),
        (b'{"prompt": 3, "answer": "a"}', r":1: the prompt .* is a number: give a string or a list of messages"),
        (b'{"prompt": null, "answer": "a"}', r":1: the prompt .* is null"),
        (b'{"prompt": ["hi"], "answer": "a"}', r':1: a message in column \'prompt\' is "hi": give'),
        (b'{"prompt": [{"role": "user"}], "answer": "a"}', r":1: a message in column 'prompt' is"),
        (
            b'{"prompt": [{"role": "user", "content": "p", "tool_calls": [1]}], "answer": "a"}',
            r":1: a message in column 'prompt' has tool_calls",
        ),
        (b'{"prompt": [], "answer": "a"}', r":1: the messages in column 'prompt' have none of role user"),
        (b'{"prompt": "p", "answer": "a", "answer": "b"}', r":1: the key 'answer' occurs twice"),
        (b'{"prompt": "p", "answer": "a", "x": {"y": 1, "y": 2}}', r":1: the key 'y' occurs twice"),
        (b'{"prompt": "p", "answer": NaN}', r":1: NaN is not JSON"),
        (b'{"prompt": "p", "answer": "a", "x": -Infinity}', r":1: -Infinity is not JSON"),
        (GOOD + b'{"prompt": "\xff\xfe", "answer": "a"}', r":2: not UTF-8 \(byte 12 of the row\)"),
        (b'{"prompt": "\\ud83d", "answer": "a"}', r":1: half of a surrogate pair"),
        (GOOD.decode().encode("utf-16"), r"train\.jsonl is UTF-16: save it as UTF-8"),
        (
            b"[" + GOOD.strip() + b"]",
            r":1: a list, not an object: a file that is one list of objects is of the format `js",
        ),
        (b'"prompt"', r":1: a string, not an object"),
        (b"[" * 100_000, r":1: "),
    ],
)
def test_a_bad_file_is_refused_with_place_and_fix(file: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read(file, content)
    assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
@given(numbers=st.lists(st.integers() | st.integers(min_value=10**18, max_value=10**21), max_size=5))
def test_a_whole_number_beyond_64_bits_is_text_and_every_row_can_be_sent(
    name: str, tmp_path_factory: pytest.TempPathFactory, numbers: list[int]
) -> None:
    """Or no answer to the row could be scored, whatever the column is for. An answer is its text in any case."""
    path = tmp_path_factory.mktemp("written") / name
    edges = [-(2**63) - 1, -(2**63), 2**63, 2**64 - 1, 2**64]
    row = {"prompt": "p", "answer": 10**4000, "x": {"numbers": [*edges, *numbers, -0.5]}}
    path.write_text(json.dumps([row] if name.endswith("json") else row))
    (found,) = records(path, columns())
    assert found.answer == "1" + "0" * 4000
    small = [n if -(2**63) <= n < 2**64 else str(n) for n in (*edges, *numbers)]
    assert found.info["x"] == {"numbers": [*small, -0.5]}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found.info)) == found.info


@given(st.lists(st.tuples(st.text(min_size=1), st.text(min_size=1)), min_size=1, max_size=20))
def test_what_json_writes_is_read_back(tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]) -> None:
    path = tmp_path_factory.mktemp("written") / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in pairs if p.strip() and a.strip()))
    expected = [(p, a) for p, a in pairs if p.strip() and a.strip()]
    if expected:
        assert [(r.prompt, r.answer) for r in records(path, columns())] == expected
