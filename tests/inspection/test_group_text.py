"""A group as a person sees it: who sampled which stretch, what came of it, when."""

from __future__ import annotations

import io
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from asyncrl.schema import Group, Trajectory, VersionSpan, to_batch
from asyncrl.staleness import Weights
from asyncrl.telemetry.table import aligned, visible
from asyncrl.telemetry.ticket import (
    STYLES,
    answer_lines,
    answers_of,
    checksums_of,
    clock,
    moments_of,
    print_lines,
    timeline,
)


def printed(batch, decode, *, terminal: bool) -> str:
    file = io.StringIO()
    answers = answers_of(batch, decode)
    print_lines(answer_lines(answers, checksums_of(batch), marks=not terminal), terminal=terminal, file=file)
    return file.getvalue()


def test_an_answer_is_split_where_its_version_changes(make_group, make_trajectory, decode):
    rows = [make_trajectory("q: ", [(b"ab", 3), (b"cde", 4)]), make_trajectory("q: ", [(b"xy", 4)], member=1)]
    first, second = answers_of(to_batch(make_group(*rows)), decode)
    assert [(piece.text, piece.tokens, piece.weights) for piece in first.pieces] == [
        ("ab", 2, Weights(1, 3)),
        ("cde", 3, Weights(1, 4)),
    ]
    assert first.prompt == "q: "
    assert first.sampled == {Weights(1, 3): 2, Weights(1, 4): 3}
    assert second.sampled == {Weights(1, 4): 2}


def test_a_character_cut_by_a_change_of_version_stands_where_it_is_completed(make_group, make_trajectory, decode):
    first, last = "é".encode()[:1], "é".encode()[1:]
    (answer,) = answers_of(to_batch(make_group(make_trajectory("q", [(b"a" + first, 1), (last + b"b", 2)]))), decode)
    assert [piece.text for piece in answer.pieces] == ["a", "éb"]


def test_text_that_nobody_sampled_is_marked_as_such(make_group, make_trajectory, decode):
    batch = to_batch(make_group(make_trajectory("q", [(b"call", 1), (b"result", None), (b"so", 1)])))
    (answer,) = answers_of(batch, decode)
    assert [(piece.text, piece.weights) for piece in answer.pieces] == [
        ("call", Weights(1, 1)),
        ("result", None),
        ("so", Weights(1, 1)),
    ]
    assert "[1]call[not sampled]result[1]so" in printed(batch, decode, terminal=False)


def test_without_a_terminal_versions_are_numbers_and_the_table_is_aligned(make_group, make_trajectory, decode):
    rows = [
        make_trajectory("reverse\n12", [(b"2", 8), (b"1", 9)], reward=1.0),
        make_trajectory("reverse\n12", [(b"12", 9)], member=1, reward=math.nan, failure="verifier_timeout"),
    ]
    assert printed(to_batch(make_group(*rows)), decode, terminal=False) == (
        "prompt      reverse\n"
        "            12\n"
        "answer 0    [8]2[9]1\n"
        "answer 1    [9]12\n"
        "sampled by  lineage 1 version 8: 1 tokens, checksum sum8\n"
        "sampled by  lineage 1 version 9: 3 tokens, checksum sum9\n"
        "\n"
        "answer  reward  exact  tokens  ends by  mean logprob  5 %     lowest  versions  failure\n"
        "0       1.000   1.000  2       stop     -0.500        -0.500  -0.500  8:1 9:1   -\n"
        "1       -       -      2       stop     -0.500        -0.500  -0.500  9:2       verifier_timeout\n"
    )


def test_on_a_terminal_each_version_has_a_colour_and_the_legend_has_the_same(make_group, make_trajectory, decode):
    batch = to_batch(make_group(make_trajectory("q", [(b"old", 8), (b"new", 9)])))
    lines = answer_lines(answers_of(batch, decode), checksums_of(batch), marks=False)
    styled = {line.plain[span.start : span.end]: span.style for line in lines for span in line.spans}
    assert styled["old"] == styled["lineage 1 version 8"] == STYLES[0]
    assert styled["new"] == styled["lineage 1 version 9"] == STYLES[1]
    assert "\x1b[36mold\x1b[0m\x1b[33mnew\x1b[0m" in printed(batch, decode, terminal=True)


def test_what_a_model_wrote_cannot_steer_the_terminal(make_group, make_trajectory, decode):
    batch = to_batch(make_group(make_trajectory("q", [(b"\x1b[2Jgone\r\x07", 1)])))
    assert r"[1]\x1b[2Jgone\r\x07" in printed(batch, decode, terminal=False)
    assert "\x1b[2J" not in printed(batch, decode, terminal=True)
    assert visible("a\u202eb\nc") == "a\\u202eb\\nc"


def test_an_answer_without_a_token_is_shown_as_nothing(make_group, make_trajectory, decode):
    batch = to_batch(make_group(make_trajectory("q", [], reward=math.nan, failure="engine_aborted")))
    shown = printed(batch, decode, terminal=False)
    assert "answer 0    nothing\n" in shown
    assert "0       -       -      0       stop     -             -    -       -         engine_aborted" in shown


def test_the_timeline_says_when_and_how_long_each_part_took(make_group, make_trajectory):
    rows = [make_trajectory("q", [(b"a", 1)], done=12.0), make_trajectory("q", [(b"b", 1)], member=1, done=12.5)]
    moments = moments_of(to_batch(make_group(*rows)))
    assert moments == {"issued": 10.0, "first token": 11.0, "done": 12.5, "scored": 13.0, "put": 14.5}
    assert timeline({**moments, "leased": 20.0}) == [
        f"issued       {clock(10.0)}",
        f"first token  {clock(11.0)}  +1.00 s",
        f"done         {clock(12.5)}  +1.50 s",
        f"scored       {clock(13.0)}  +0.50 s",
        f"put          {clock(14.5)}  +1.50 s",
        f"leased       {clock(20.0)}  +5.50 s",
        "in all       10.00 s",
    ]
    assert timeline({"issued": 10.0}) == [f"issued  {clock(10.0)}"]
    assert timeline({}) == []


@given(st.binary(max_size=4), st.lists(st.tuples(st.binary(min_size=1, max_size=5), st.integers(0, 2)), max_size=6))
def test_whatever_was_sampled_the_pieces_are_the_text(prompt, stretches):
    ids, versions, spans = list(prompt), [-1] * len(prompt), []
    for content, version in stretches:
        spans.append(VersionSpan(Weights(1, version), len(ids), len(ids) + len(content), ""))
        ids += content
        versions += [version] * len(content)
    if not ids:
        return

    def decode(tokens):
        return bytes(tokens).decode("utf-8", errors="replace")

    mask = np.array(versions) >= 0
    row = Trajectory(
        token_ids=np.array(ids, np.int32),
        loss_mask=mask.astype(np.uint8),
        logprobs=np.where(mask, np.float32(-1), np.float32(0)),
        versions=np.array(versions, np.int32),
        member=0,
        prompt_length=len(prompt),
        spans=tuple(spans),
        reward=0.0,
        reward_parts={},
        finish_reason="stop",
    )
    (answer,) = answers_of(to_batch(Group(0, 1, 1, "t", "r", "c", "c/0", {}, 1.0, 2.0, [row])), decode)
    shown = decode(prompt).rstrip("\ufffd") + "".join(piece.text for piece in answer.pieces)
    assert shown == decode(ids) or not stretches
    assert sum(piece.tokens for piece in answer.pieces) == len(ids) - len(prompt)


def test_columns_line_up_and_rows_may_be_short():
    assert aligned([("a", "bb", "c"), ("long", "b")]) == ["a     bb  c", "long  b"]
    assert aligned([]) == []


def test_lines_of_a_file_have_no_trailing_blanks():
    file = io.StringIO()
    print_lines([Text("a  "), Text()], terminal=False, file=file)
    assert file.getvalue() == "a\n\n"
