"""JSONL: what is read, what is refused and how it is said, and a split that cannot leak."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.errors import DataError
from asyncrl.data.jsonl import Record, prompt_key, read_jsonl, shared_prompts, split_heldout

GOOD = b'{"prompt": "p", "answer": "a"}\n'


def read(path: Path, content: bytes) -> list[Record]:
    path.write_bytes(content)
    return read_jsonl(path, prompt="prompt", answer="answer")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "train.jsonl"


def test_columns_are_mapped_and_the_others_are_kept(file: Path) -> None:
    file.write_text(
        '{"problem": "2+2", "solution": 4, "source": {"book": 1}}\n\n{"problem": "Größe 😀", "solution": "\\u00fc"}'
    )
    first, second = read_jsonl(file, prompt="problem", answer="solution")
    assert first == Record(row=1, prompt="2+2", answer="4", info={"source": {"book": 1}})
    assert second == Record(row=3, prompt="Größe 😀", answer="ü", info={})


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
        (b'{"prompt": [], "answer": "a"}', r":1: the messages in column 'prompt' have none of role user"),
        (b'{"prompt": "p", "answer": "a", "answer": "b"}', r":1: the key 'answer' occurs twice"),
        (b'{"prompt": "p", "answer": "a", "x": {"y": 1, "y": 2}}', r":1: the key 'y' occurs twice"),
        (b'{"prompt": "p", "answer": NaN}', r":1: NaN is not JSON"),
        (b'{"prompt": "p", "answer": "a", "x": -Infinity}', r":1: -Infinity is not JSON"),
        (GOOD + b'{"prompt": "\xff\xfe", "answer": "a"}', r":2: not UTF-8 \(byte 12 of the row\)"),
        (b'{"prompt": "\\ud83d", "answer": "a"}', r":1: half of a surrogate pair"),
        (b"\xef\xbb\xbf" + GOOD, r"train\.jsonl starts with a byte order mark: save it as UTF-8 without"),
        (GOOD.decode().encode("utf-16"), r"train\.jsonl is UTF-16: save it as UTF-8"),
        (b"[" + GOOD.strip() + b"]", r":1: a list, not an object: of a \.json file, make a JSONL file with `jq"),
        (b'"prompt"', r":1: a string, not an object"),
        (b"[" * 100_000, r":1: "),
        (b'{"prompt": "p", "answer": ' + b"9" * 10_000 + b"}", r":1: "),
    ],
)
def test_a_bad_file_is_refused_with_place_and_fix(file: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read(file, content)
    assert len(str(caught.value).splitlines()) <= 3


def test_a_missing_file_is_named_with_the_folder_that_was_searched(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl does not exist \(relative to /"):
        read_jsonl(Path("none.jsonl"), prompt="prompt", answer="answer")
    with pytest.raises(DataError, match=r"cannot be read: Is a directory"):
        read_jsonl(tmp_path, prompt="prompt", answer="answer")


@given(st.lists(st.tuples(st.text(min_size=1), st.text(min_size=1)), min_size=1, max_size=20))
def test_what_json_writes_is_read_back(tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]) -> None:
    path = tmp_path_factory.mktemp("written") / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in pairs if p.strip() and a.strip()))
    expected = [(p, a) for p, a in pairs if p.strip() and a.strip()]
    if expected:
        assert [(r.prompt, r.answer) for r in read_jsonl(path, prompt="prompt", answer="answer")] == expected


def records(prompts: list[str]) -> list[Record]:
    return [Record(row, prompt, "a", {}) for row, prompt in enumerate(prompts, start=1)]


@given(st.lists(st.text(alphabet="abc \n", max_size=4), min_size=2, max_size=40))
def test_a_split_loses_no_row_and_no_prompt_is_on_both_sides(prompts: list[str]) -> None:
    rows = records(prompts)
    if len({prompt_key(row.prompt) for row in rows}) < 2:
        with pytest.raises(DataError, match="same prompt"):
            split_heldout(rows)
        return
    train, heldout = split_heldout(rows)
    assert train
    assert heldout
    assert sorted([*train, *heldout], key=lambda record: record.row) == rows
    assert shared_prompts(train, heldout) == 0


def test_about_one_prompt_in_ten_is_held_out_and_keeps_its_side_when_rows_are_added() -> None:
    _, before = split_heldout(records([f"question {n}" for n in range(2000)]))
    _, after = split_heldout(records([f"question {n}" for n in range(4000)]))
    assert 150 < len(before) < 250
    assert {record.prompt for record in before} <= {record.prompt for record in after}


def test_white_space_and_the_form_of_a_prompt_do_not_make_it_another() -> None:
    assert prompt_key("what is\n 2+2?") == prompt_key([{"role": "user", "content": " what is 2+2? "}])
    assert prompt_key("a") != prompt_key([{"role": "system", "content": "a"}])
