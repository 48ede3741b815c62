"""Reading a run's answers: which, in what order, by keys on a real terminal, and never as commands to it."""

from __future__ import annotations

import json
import math
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.telemetry.browser import HELP, Browser, Page
from asyncrl.telemetry.view import ORDERS, Shown, Wanted, answer_text, as_json, chosen, classes, summary_line
from tests.commands import Ended
from tests.inspection.recorded import NAME, record

RIGHT = Shown("f:1", "member 0", "2+2?", "4", 1.0, {"exact": 1.0}, tokens=2)
WRONG = Shown("f:1", "member 1", "2+2?", "five!", 0.0, {"exact": 0.0}, label="wrong_answer", tokens=6)
LOST = Shown("f:2", "member 0", "1+1?", "", None, {"exact": None}, label="verifier_timeout", tokens=9)
EVERY = [WRONG, LOST, RIGHT]


@pytest.mark.parametrize(
    ("wanted", "order", "found"),
    [
        (Wanted(), "trained", [WRONG, LOST, RIGHT]),
        (Wanted(), "worst", [WRONG, RIGHT, LOST]),
        (Wanted(), "best", [RIGHT, WRONG, LOST]),
        (Wanted(), "longest", [LOST, WRONG, RIGHT]),
        (Wanted(wrong="wrong_answer"), "trained", [WRONG]),
        (Wanted(unscored=True), "trained", [LOST]),
        (Wanted(row="f:1"), "best", [RIGHT, WRONG]),
        (Wanted(containing="!"), "best", [WRONG]),
        (Wanted(row="f:1", unscored=True), "best", []),
    ],
)
def test_answers_are_picked_and_ordered(wanted, order, found) -> None:
    assert chosen(EVERY, wanted, order) == found


def test_a_page_is_summed_up_in_a_line_and_its_classes_are_counted() -> None:
    assert classes([WRONG, WRONG, LOST, RIGHT]) == {"wrong_answer": 2, "verifier_timeout": 1}
    assert summary_line("step 3", EVERY, 3) == (
        "step 3: 3 answers, mean reward 0.500, wrong_answer 1, verifier_timeout 1"
    )


def browser(**of) -> Browser:
    pages = [Page("step 1", lambda: [RIGHT]), Page("step 2", lambda: EVERY)]
    return replace(Browser(pages, [Page("evaluation of version 2", lambda: [WRONG])], at=(1, 0)), **of)


def pressed(start: Browser, keys: str) -> Browser:
    for key in keys:
        start = start.press(key)
    return start


def test_keys_lead_through_answers_steps_and_kinds_and_stop_at_the_ends() -> None:
    assert pressed(browser(), "nn").n == 2
    assert pressed(browser(), "nnnnnn").n == 2
    assert pressed(browser(), "np").n == pressed(browser(), "pp").n == 0
    assert pressed(browser(), "[").page.title == pressed(browser(), "[[[").page.title == "step 1"
    assert pressed(browser(), "nn[]").n == 0, "another page begins at its first answer"
    assert pressed(browser(), "e").page.title == "evaluation of version 2"
    assert pressed(browser(), "ee").page.title == "step 2"
    assert pressed(browser(evaluated=[]), "e").page.title == "step 2", "there are none"
    assert pressed(browser(), "q").ended
    assert browser().press("escape").ended
    assert browser().press("right").n == 1


def test_keys_choose_classes_orders_and_rows_and_take_them_back() -> None:
    def seen(keys: str) -> list[Shown]:
        return pressed(browser(), keys).answers()[1]

    assert seen("w") == [WRONG]
    assert seen("ww") == [LOST]
    assert seen("www") == EVERY
    assert seen("u") == [LOST]
    assert seen("uu") == EVERY
    assert seen("r") == [WRONG, RIGHT], "of the same row as the answer on the screen"
    assert seen("o") == [WRONG, RIGHT, LOST]
    assert seen("o" * len(ORDERS)) == EVERY


def test_a_page_on_which_nothing_is_wanted_says_so_and_keys_lead_on() -> None:
    empty = pressed(browser(), "wu")
    assert "no answer of this page is like that" in "\n".join(line.plain for line in empty.screen())
    assert pressed(empty, "nprn").answers()[1] == []
    assert pressed(empty, "u").answers()[1] == [WRONG]


@given(st.lists(st.sampled_from([*"npwuroe[]hx7", "up", "down", "left", "right"]), max_size=40))
def test_no_key_leads_where_nothing_can_be_shown(keys: list[str]) -> None:
    at = browser()
    for key in keys:
        at = at.press(key)
        assert at.screen()
    assert not at.ended


def test_what_a_model_wrote_is_shown_and_not_obeyed() -> None:
    hostile = replace(WRONG, answer="\x1b]0;title\x07\x1b[2J\u202e", prompt="a\rb", detail="\x1b[31m", row_id="\x1b[H")
    shown = "\n".join(line.plain for line in answer_text(hostile, title="1/1"))
    assert not any(char in shown for char in "\x1b\x07\r\u202e")
    assert json.loads(as_json(hostile))["answer"] == hostile.answer


def test_what_was_expected_is_shown_or_why_it_is_not_known() -> None:
    def said(shown: Shown) -> str:
        return "\n".join(line.plain for line in answer_text(shown, title="1/1"))

    assert "expected  4" in said(replace(RIGHT, expected="4"))
    assert "expected  not known here: the file is gone\\x1b" in said(replace(RIGHT, unknown="the file is gone\x1b"))
    assert "expected" not in said(RIGHT), "of a row that has no answer"


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_json_has_null_where_there_is_no_number(value: float | None) -> None:
    document = json.loads(as_json(replace(RIGHT, parts={"exact": value})), parse_constant=lambda name: 1 / 0)
    assert document["parts"] == {"exact": None}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = record(tmp_path_factory.mktemp("runs") / NAME)
    (folder / "eval").mkdir()
    old = {"row_id": "h:1", "prompt": "reverse 12", "answer": "12", "expected": "21", "reward": 0.0}
    entries = [{**old, "failure": "", "finish_reason": "stop"}, {**old, "reward": None, "failure": "verifier_died"}]
    entries[1]["finish_reason"] = "length"
    (folder / "eval" / "eval-1-0.json").write_text(json.dumps({"success": 0.0, "n": 2, "answers": entries}))
    return folder


def test_without_a_terminal_answers_are_printed(run: Path, called: Callable[..., Ended]) -> None:
    said = called("view", str(run), "--n", "1")
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("step 1: 4 answers")
    assert "prompt" in said.stdout
    lines = [json.loads(line) for line in called("view", str(run), "--json").stdout.splitlines()]
    assert [line["member"] for line in lines] == ["member 0", "member 1"] * 2
    one = called("view", str(run), "--json", "--row", lines[0]["row_id"])
    assert len(one.stdout.splitlines()) == 2


def test_evaluations_of_older_versions_are_read_too(run: Path, called: Callable[..., Ended]) -> None:
    said = called("view", str(run), "--eval", "0", "--unscored")
    assert "verifier_died" in said.stdout
    assert "expected  21" in said.stdout


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--step", "9"), "has no step 9; it has 1 to 1"),
        (("--eval", "7"), "has no evaluation of version 7; it has: 0"),
        (("--step", "1", "--eval", "0"), "give one of them"),
    ],
)
def test_what_is_not_there_is_said(run: Path, called: Callable[..., Ended], options, complaint: str) -> None:
    said = called("view", str(run), *options)
    assert said.returncode == 2
    assert complaint in said.stderr


def test_a_part_that_is_damaged_is_said_in_a_line(tmp_path: Path, run: Path, called: Callable[..., Ended]) -> None:
    folder = tmp_path / NAME
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("store"))
    (part,) = (folder / "archive").glob("step-*.parquet")
    part.write_bytes(b"PAR1 and no more")
    said = called("view", str(folder), "--n", "1")
    assert said.returncode == 1
    assert said.stderr.startswith("Error: what step 1 trained cannot be read: ")
    assert "fault of asyncrl" not in said.stderr
    assert called("view", str(folder), "--eval", "0").returncode == 0, "all else can be"
    (folder / "eval" / "eval-1-0.json").write_text("{")
    said = called("view", str(folder), "--eval", "0")
    assert (said.returncode, "eval-1-0.json is damaged, move it away" in said.stderr) == (1, True)


@pytest.fixture
def terminal(run: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`asyncrl view` on a terminal of its own, and our end of it."""
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "asyncrl.cli.main", "view", str(run)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True)
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait(10)
        os.close(ours)


def until(terminal: int, words: bytes, limit_s: float = 60.0) -> bytes:
    """What the terminal shows until it shows `words`."""
    seen, end = b"", time.monotonic() + limit_s
    while words not in seen:
        assert time.monotonic() < end, seen[-2000:]
        if select.select([terminal], [], [], 0.5)[0]:
            seen += os.read(terminal, 65536)
    return seen


@pytest.mark.faults
def test_on_a_terminal_keys_lead_and_it_is_left_as_it_was(terminal) -> None:
    process, ours = terminal
    until(ours, b"1/4")
    os.write(ours, b"n")
    until(ours, b"2/4")
    os.write(ours, b"\x1b[D")
    until(ours, b"1/4")
    os.write(ours, b"h")
    until(ours, HELP[-1][1].encode())
    os.write(ours, b" ")
    until(ours, b"1/4")
    os.write(ours, b"e")
    until(ours, b"evaluation of version 0")
    os.write(ours, b"q")
    until(ours, b"\x1b[?1049l")
    assert process.wait(30) == 0
