"""What `asyncrl status` says of weights on their way and of proofs, from what collectors' beats say."""

from __future__ import annotations

import re
from typing import Any

from asyncrl.buffers.base import MemberStats
from asyncrl.collectors.course import Course
from asyncrl.runtime.weights_text import checked, proof_lines, weights_lines
from asyncrl.staleness import Weights
from asyncrl.weights.reach import Choice
from tests.inspection.ledger import NOW, stats
from tests.inspection.ledger import member as ledger_member


def member(name: str, *, version: int | None = 7, alive: bool = True, **info: Any) -> MemberStats:
    serving = None if version is None else Weights(1, version)
    return ledger_member(name, serving=serving, alive=alive, progress=info)


def told(phase: str | None, transport: str = "shm", error: str = "") -> dict[str, Any]:
    course = Course(deadline_s=10.0, fallback=None)
    course.first = Choice(transport, "both on a")  # type: ignore[arg-type]
    if phase is not None:
        course.announced(Weights(1, 8), 50.0)
        course.enter(phase, 50.0)  # type: ignore[arg-type]
    course.error = error
    return course.told(now=62.0, unix=NOW)


def test_a_row_says_over_what_and_why_and_in_which_phase_since_when() -> None:
    lines = weights_lines(
        stats(
            members=[
                member("c0", weights=told(None)),
                member("c1", weights=told("stage", "file", error="cut off")),
                member("c2", version=None, weights=told("verify")),
            ]
        )
    )
    assert [re.sub(" +", " ", line) for line in lines] == [
        "weights over serves phase",
        "c0 shm 1/7 - both on a",
        "c1 file 1/7 stage 1/8 for 0:12 both on a; last error: cut off",
        "c2 shm - verify 1/8 for 0:12 both on a",
    ]


def test_what_is_staged_and_waits_for_running_requests_is_no_phase() -> None:
    way = {**told("stage"), "phase": None}
    (_, line) = weights_lines(stats(members=[member("c0", weights=way)]))
    assert "1/8 staged, waits for what runs" in line


def test_a_beat_of_another_form_is_left_out_and_one_of_another_mind_is_shown_as_text() -> None:
    odd = [member("a"), member("b", weights="soon"), member("c", weights={"transport": 3})]
    assert weights_lines(stats(members=odd)) == []
    (_, line) = weights_lines(stats(members=[member("\x1b[2J", weights={**told("stage"), "why": "\x07"})]))
    assert "\x1b" not in line
    assert "\x07" not in line


def proof(checksum: str, version: int | None = 7, error: str = "", id: str = "q") -> dict[str, Any]:
    weights = None if version is None else [1, version]
    return {"id": id, "engines": [{"engine": "e/0", "weights": weights, "checksum": checksum, "error": error}]}


PUBLISHED = {"1/7": "aaaa", "1/8": "bbbb"}


def test_each_engine_is_compared_with_the_version_it_says_it_serves() -> None:
    found = checked(
        [
            member("same", verified=proof("aaaa")),
            member("newer", verified=proof("bbbb", 8)),
            member("other", verified=proof("cccc")),
            member("unhashed", verified=proof("dddd", 9)),
            member("empty", verified=proof("", None)),
            member("broken", verified=proof("", None, error="out of memory")),
            member("earlier", verified=proof("aaaa", id="p")),
            member("mute"),
            member("gone", alive=False),
        ],
        "q",
        PUBLISHED,
    )
    assert [(one.collector, one.verdict, one.wrong) for one in found] == [
        ("same", "equal", False),
        ("newer", "equal", False),
        ("other", "differs", True),
        ("unhashed", "not comparable", False),
        ("empty", "serves nothing", False),
        ("broken", "failed", True),
        ("earlier", "no answer", True),
        ("mute", "no answer", True),
    ]
    said = "\n".join(proof_lines(found))
    assert "other serves other weights than were published as 1/7: expected aaaa, found cccc" in said
    assert "mute did not answer in time: what it serves is not proved" in said
    assert "failed: out of memory" in said
