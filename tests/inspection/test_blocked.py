"""Who waits for whom, from one snapshot."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import datetime

import pytest

from asyncrl.buffers.base import Blocked, State, Waiting
from asyncrl.buffers.blocked import SILENT_S, blocked_lines, blocked_parties, process_of, process_state
from asyncrl.learners.phase import LearnerPhase, Phase, PhaseFile, read
from asyncrl.runtime.status import learner_fact, lost_learner
from tests.inspection.ledger import LIMITS, NOW, member, stats

HERE = socket.gethostname()


def told(*waits) -> dict:
    return {"waits": [{"for": what, "since": since, "by": by} for what, since, by in waits]}


def test_everyone_who_waits_is_named_the_longest_first():
    parties = blocked_parties(
        stats(
            blocked=(Blocked("learner", "tickets 3, 4 on collector-0", NOW - 40, "collector-0"),),
            members=[
                member("collector-0", beat_age_s=41.0, issued=2),
                member("collector-1", progress=told(("weights to arrive", NOW - 5.0, "the learner's transport"))),
                member("collector-2"),
            ],
        ),
        LIMITS,
    )
    assert [(party.who, party.waits_for, NOW - party.since, party.unblocked_by) for party in parties] == [
        (
            "collector-0",
            "a sign of life (it has 2 tickets)",
            41.0,
            "its process; its tickets are given back at the next call of anyone",
        ),
        ("learner", "tickets 3, 4 on collector-0", 40, "collector-0"),
        ("collector-1", "weights to arrive", 5.0, "the learner's transport"),
    ]


def test_a_collector_is_named_before_it_is_given_up_and_not_for_one_late_beat():
    def silent(seconds: float):
        return blocked_parties(stats(members=[member(beat_age_s=seconds, issued=1)]), LIMITS)

    assert silent(SILENT_S - 1) == []
    (party,) = silent(10.0)
    assert party.unblocked_by == "its process; in 20 s its tickets are given back"


def test_what_a_silent_collector_said_last_is_not_taken_for_now():
    silent = member(beat_age_s=20.0, progress=told(("a token", NOW - 60, "the engine")))
    asked = Blocked(silent.name, "room in the window", NOW - 19, "the learner's commit")
    found = blocked_parties(stats(blocked=(asked,), members=[silent]), LIMITS)
    assert [party.waits_for for party in found] == ["a sign of life (it has no ticket)"]


def test_nobody_waits_in_a_run_that_has_ended():
    ended = stats(phase="ended", members=[member(beat_age_s=100.0)])
    assert blocked_parties(ended, LIMITS) == []
    assert blocked_lines([], now=NOW) == ["nobody waits"]


@pytest.mark.parametrize("waits", [None, 3, "weights", [1], [{"for": 1, "since": 2.0, "by": "x"}], [{"for": "x"}]])
def test_a_beat_of_another_form_is_no_wait(waits):
    assert blocked_parties(stats(members=[member(progress={"waits": waits})]), LIMITS) == []


def test_parties_that_wait_for_the_same_are_one_row_and_the_table_is_bounded():
    def at(since: float) -> str:
        return f"{datetime.fromtimestamp(since):%H:%M:%S}"

    same = [Blocked(f"collector-{n}", "room in the window", NOW - 60 - n, "the learner's commit") for n in range(3)]
    others = [Blocked(f"c{n}", f"thing {n}", NOW, "someone") for n in range(4)]
    assert blocked_lines([*same, *others], now=NOW, most=2) == [
        "who                     waits for           since            who can end it",
        f"collector-0 and 2 more  room in the window  1:02 ({at(NOW - 62)})  the learner's commit",
        f"c0                      thing 0             0:00 ({at(NOW)})  someone",
        "... and 3 more: `asyncrl status`",
    ]


def test_a_name_from_the_store_cannot_steer_the_terminal():
    lines = blocked_lines([Blocked("c\x1b[2J", "x\x07", NOW, "y\r")], now=NOW)
    assert all(line.isprintable() for line in lines)
    assert "\\x1b[2J" in process_of({"pid": 1, "host": "\x1b[2J"})


def test_a_process_of_this_host_is_looked_at():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert process_state(child.pid, HERE) == ""
        child.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while process_state(child.pid, HERE) != "is stopped":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert process_of({"pid": child.pid, "host": HERE}) == f"its process, {child.pid} on {HERE}, which is stopped"
        learner = LearnerPhase(phase=Phase.TRAINING, step=3, since=NOW, pid=child.pid, host=HERE)
        (party,) = lost_learner(learner)
        assert party.waits_for == "its process, which is stopped in mid-training"
        assert party.unblocked_by == f"kill -CONT {child.pid}"
    finally:
        child.kill()
        child.wait(timeout=10)
    assert process_state(child.pid, HERE) == "is gone"
    assert [party.unblocked_by for party in lost_learner(learner)] == ["asyncrl run --resume"]
    assert process_state(child.pid, "elsewhere") == ""
    assert process_of({}) == process_of({"pid": "1", "host": None}) == "its process"


@pytest.mark.asyncio
async def test_the_learner_says_what_it_does_and_a_reader_never_sees_half(tmp_path):
    assert read(tmp_path) is None
    file = PhaseFile(tmp_path)
    file.enter(Phase.STARTING)
    assert read(tmp_path).phase == Phase.STARTING
    file.enter(Phase.TRAINING, step=12)  # over before anybody could see it
    file.enter(Phase.LEASING, step=13)
    async with asyncio.timeout(10):
        while (found := read(tmp_path)).phase == Phase.STARTING:  # noqa: ASYNC110 (a file sets no event)
            await asyncio.sleep(0.01)
    assert (found.phase, found.step, found.pid, found.host) == (Phase.LEASING, 13, os.getpid(), HERE)
    assert [path.name for path in tmp_path.iterdir()] == ["learner.json"]
    (tmp_path / "learner.json").write_text("{}")
    with pytest.raises(ValueError, match=r"learner\.json is not what a learner writes"):
        read(tmp_path)


def test_a_full_disk_ends_no_run(tmp_path, caplog):
    PhaseFile(tmp_path / "missing").enter(Phase.STARTING)
    assert "`asyncrl status` will not know that the learner is starting" in caplog.text


def test_what_the_learner_does_is_told_by_its_file_or_else_by_the_store():
    own = LearnerPhase(phase=Phase.PUBLISHING, step=13, since=NOW - 61, pid=1, host="h")
    assert learner_fact(own, stats()) == "publishing step 13 for 1:01 (process 1 on h)"
    assert learner_fact(LearnerPhase(phase=Phase.ENDED, step=0, since=NOW, pid=1, host="h"), stats()) == "has ended"
    assert learner_fact(None, stats(lineage=0)) == "never started"
    assert "has the batch of step 13" in learner_fact(None, stats({State.LEASED: 2}))
    assert learner_fact(None, stats(waiting=Waiting((), (), "x", NOW))) == "leasing step 13"
