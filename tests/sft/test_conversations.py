"""Rows of conversations: what is read, what is refused and how it is said, what is left out and counted."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.config.sft import SftData
from asyncrl.data.bad_rows import BadRows
from asyncrl.data.conversations import read_split
from asyncrl.data.errors import DataError
from tests.sft.conftest import Read, jsonl, turns

GOOD = b'{"prompt": "p", "answer": "a"}\n'


def messages(*pairs: tuple[str, str]) -> bytes:
    return json.dumps({"messages": turns(*pairs)}).encode() + b"\n"


def test_both_forms_of_a_row_give_the_same_conversation(read: Read) -> None:
    talk = turns(("user", "2+2?"), ("assistant", "4"))
    rows = [{"messages": talk}, {"prompt": "2+2?", "answer": 4}, {"prompt": talk[:1], "answer": "4", "source": None}]
    assert [list(row.messages) for row in read(jsonl(rows).encode())] == [talk] * 3


def test_several_turns_a_system_message_and_windows_line_ends_are_fine(read: Read) -> None:
    said = [("system", "Be brief."), ("user", "hi"), ("assistant", "ho"), ("user", "and?"), ("assistant", "hum")]
    (row,) = read(messages(*said).replace(b"\n", b"\r\n"))
    assert list(row.messages) == turns(*said)
    assert row.where.endswith("rows.jsonl:1")
    assert row.prompt == turns(*said[:2])


def test_results_of_tools_stand_where_the_users_next_message_would(read: Read) -> None:
    said = [("user", "hi"), ("assistant", "calls"), ("tool", "1"), ("tool", "2"), ("assistant", "3"), ("user", "and?")]
    (row,) = read(messages(*said, ("assistant", "4")))
    assert [message["role"] for message in row.messages][2:4] == ["tool", "tool"]
    assert row.prompt == turns(*said[:1])


BAD = {
    b'{"messages": null}': ("null", "column 'messages' is null: give a list of messages"),
    b'{"messages": []}': ("empty", "the list of messages is empty"),
    b'{"messages": "hi"}': ("wrong-type", "column 'messages' is a string"),
    b'{"messages": ["hi"]}': ("wrong-type", 'message 1 is "hi": give {"role"'),
    b'{"messages": [{"role": "user", "content": null}]}': ("null", "message 1 has the content null"),
    b'{"messages": [{"role": "user", "content": [1]}]}': ("wrong-type", "message 1 has the content [1]"),
    b'{"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}': ("wrong-type", "also has tool_calls"),
    messages(("assistant", "a")): ("wrong-role", 'message 1 is of role "assistant", where user is due'),
    messages(("user", "a"), ("user", "b")): ("wrong-role", 'message 2 is of role "user", where assistant is due'),
    messages(("user", "a"), ("system", "b")): ("wrong-role", 'message 2 is of role "system"'),
    messages(("user", "a"), ("tool", "b")): ("wrong-role", 'message 2 is of role "tool"'),
    messages(("user", "a")): ("wrong-role", "the last message is of role user: end with the assistant's answer"),
    messages(("system", "a")): ("wrong-role", "the last message is of role system"),
    messages(("user", "a"), ("assistant", " \n")): ("empty", "message 2, of role assistant, is empty"),
    messages(("user", ""), ("assistant", "b")): ("empty", "message 1, of role user, is empty"),
    b'{"prompt": "p", "answer": null}': ("null", "the answer (column 'answer') is null"),
    b'{"prompt": "p", "answer": ""}': ("empty", "the answer (column 'answer') is empty"),
    b'{"prompt": "p", "answer": {}}': ("wrong-type", "the answer (column 'answer') is an object"),
    b'{"prompt": "p"}': ("missing-column", "no column 'answer'; the row has 'prompt'"),
    b'{"text": "p"}': ("missing-column", "neither 'messages' nor 'prompt' and 'answer' are among its columns: 'text'"),
    b'{"prompt": "\\ud83d", "answer": "a"}': ("not-text", "half of a surrogate pair"),
    b'{"prompt": "\xed\xa0\xbd", "answer": "a"}': ("not-utf8", "not UTF-8"),
    b'{"prompt": "p", "answer"': ("not-json", "not JSON"),
    b'{"prompt": "p", "answer": NaN}': ("not-json", "NaN is not JSON"),
    b"[1]": ("wrong-type", "a list, not an object"),
    b"[" * 200_000: ("not-json", "rows.jsonl:2"),
    b'{"prompt": "' + b"x" * 1_000_000: ("not-json", "not JSON"),
}


@pytest.mark.parametrize(("line", "reason", "said"), [(line, *what) for line, what in BAD.items()])
def test_a_bad_row_is_refused_by_file_row_and_fix_or_left_out_and_counted(
    read: Read, line: bytes, reason: str, said: str
) -> None:
    content = GOOD + line.rstrip(b"\n") + b"\n" + GOOD
    with pytest.raises(DataError) as caught:
        read(content)
    message = str(caught.value)
    assert "rows.jsonl:2: " in message
    assert said in message
    assert message.endswith("data.bad_rows=skip")
    assert len(message.splitlines()) <= 3
    assert len(message) < 600

    bad = BadRows("skip", key="data.bad_rows")
    assert len(read(content, bad)) == 2
    assert bad.by_reason == {reason: 1}


def test_a_byte_order_mark_is_harmless(read: Read) -> None:
    assert len(read(b"\xef\xbb\xbf" + GOOD * 2)) == 2


def test_rows_of_both_forms_stand_in_one_columnar_file(tmp_path: Path) -> None:
    rows = [{"messages": turns(("user", "2+2?"), ("assistant", "4"))}, {"prompt": "2+3?", "answer": "5"}]
    columns = {name: [row.get(name) for row in rows] for name in ("messages", "prompt", "answer")}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    split = read_split(SftData(train=str(tmp_path / "rows.parquet")))
    assert sorted(row.messages[-1]["content"] for row in [*split.train, *split.heldout]) == ["4", "5"]


def test_a_line_of_a_megabyte_is_a_row_like_any_other(read: Read) -> None:
    (row,) = read(jsonl([{"prompt": "p", "answer": "x" * 1_000_000}]).encode())
    assert len(row.messages[-1]["content"]) == 1_000_000


def test_what_was_left_out_is_said_once_a_reason_and_summed_up(read: Read, caplog: pytest.LogCaptureFixture) -> None:
    bad = BadRows("skip", key="data.bad_rows")
    with caplog.at_level(logging.WARNING):
        read(GOOD + b'{"prompt": null, "answer": "a"}\n' * 3 + b"{\n", bad)
    assert [record.message.split(": ")[0] for record in caplog.records] == ["left out (null)", "left out (not-json)"]
    assert str(bad) == "4 rows left out: null 3, not-json 1"


def test_a_file_in_which_every_row_is_left_out_is_refused(read: Read) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl has no usable row.*2 rows left out: not-json 2"):
        read(b"{\n{\n", BadRows("skip", key="data.bad_rows"))
    with pytest.raises(DataError, match=r"rows\.jsonl has no usable row"):
        read(b"\n")


def test_conversations_that_begin_alike_are_on_one_side_of_the_split(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"question {n % 50}", "answer": str(n)} for n in range(200)]
    file.write_text(jsonl(rows))
    split = read_split(SftData(train=str(file)))
    sides = [{str(row.prompt) for row in side} for side in (split.train, split.heldout)]
    assert len(split.train) + len(split.heldout) == 200
    assert not sides[0] & sides[1]
    assert sides[1]


def test_held_out_rows_that_are_also_trained_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(jsonl([{"prompt": "a", "answer": "b"}]))
    split = read_split(SftData(train=str(file), heldout=str(file)))
    assert len(split.train) == len(split.heldout) == 1
    assert "held-out loss will look too good" in caplog.text
