"""The ledger as a person reads it: sums, rows, what the next step chooses from, one ticket."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncrl.buffers.base import State
from asyncrl.runtime.inspection import Found
from asyncrl.runtime.inspection_text import head_lines, row_lines, status_lines, ticket_lines
from asyncrl.schema import to_batch
from asyncrl.staleness import Weights
from asyncrl.telemetry.ticket import clock
from tests.inspection.ledger import LIMITS, NOW, member, row, stats


def test_status_has_the_sums_ages_window_bytes_and_collectors():
    shown = status_lines(
        stats(
            {State.ISSUED: 2, State.HELD: 1, State.TRAINED: 24, State.STALE: 1},
            reasons={"trained/trained": 24, "stale/over_age": 1},
            returns={"member_lost": 3},
            dues={12: 1, 13: 2},
            bytes_held=9_700,
            bytes_reserved=2 << 20,
            archived={"trained/trained": 20},
            checkpoint=10,
            quarantined=1,
            refused_puts=2,
            members=[
                member(issued=2, progress={"tokens_per_s": 1234.5}),
                member("collector-1", beat_age_s=40.0, serving=None),
            ],
        ),
        LIMITS,
        aside=["5:0"],
    )
    assert shown == [
        "run r       running, version 12 of 60, lineage 1",
        "tickets     28 = 0 returned + 2 issued + 1 held + 0 leased + 24 trained + 1 stale + 0 filtered + 0 failed",
        "ended as    trained/trained:24  stale/over_age:1",
        "went back   member_lost:3",
        "ages        0: 2  1: 1 (issued and held groups, at the next step; at most 1)",
        "window      3 of 4 groups live: (max_trajectory_age 1 + 1) x 2",
        "bytes       2.1M of 4.3G: 9.7k held, 2.1M reserved with tickets, 0 kept to rewind",
        "rows        8 in the store, 20 archived",
        "checkpoint  version 10",
        "set aside   1 damaged or foreign groups; kept: ticket:attempt 5:0",
        "refused     2 puts of attempts that were no longer wanted",
        "",
        "collector    serves  tickets  tokens/s  last beat",
        "collector-0  1/12    2        1.2k      0.5 s ago",
        "collector-1  -       0        -         40.0 s ago  given up: silent for more than 30 s",
    ]


def test_ages_are_those_at_the_step_after_the_leased_one():
    assert "ages        1: 2 (issued" in status_lines(stats({State.LEASED: 2, State.HELD: 2}, dues={13: 2}), LIMITS)[4]


def test_a_run_that_failed_says_why():
    shown = status_lines(stats(phase="ended", error="LearnerError: x\nlearner  a batch"), LIMITS)
    assert shown[0] == "run r       ended with an error, version 12 of 60, lineage 1"
    assert shown[-3:] == ["", "it failed: LearnerError: x", "learner  a batch"]


def test_a_run_without_a_collector_says_whether_one_was_lost():
    assert status_lines(stats(), LIMITS)[-1] == "no collector is connected"
    lost = status_lines(stats(returns={"member_lost": 13}), LIMITS)[-1]
    assert lost == "no collector is connected; 13 tickets came back from lost ones"


def test_rows_are_aligned_and_say_what_trained_them_and_for_how_long_they_are_so():
    uses = (Weights(1, 3), Weights(2, 4))
    trained = row(
        0, State.TRAINED, reason="trained", trained=uses[-1], uses=uses, times={"issued": 1.0, "ended": NOW - 5}
    )
    assert row_lines([trained, row(12, State.HELD, 7, times={"issued": NOW - 70, "put": NOW - 61})], now=NOW) == [
        "ticket  state    reason   attempt  collector    from version  trained by  bytes  for",
        "0       trained  trained  0        collector-0  -             1/3 2/4     -      0:05",
        "12      held     -        0        collector-0  7             -           9.7k   1:01",
    ]


def heads(*rows, **changes):
    counts = {state: sum(one.state is state for one in rows) for state in (State.ISSUED, State.HELD)}
    lines = head_lines(stats(counts, **changes), LIMITS, rows)
    return lines[0], [(line.split()[0], line.rpartition("  ")[2]) for line in lines[2:-1]], lines[-1]


def test_head_shows_the_batch_that_stands():
    about, verdicts, outcome = heads(row(3, State.HELD, 12), row(4, State.HELD, 12), row(5, State.ISSUED, 12))
    assert about == "step 13 trains 2 of the 3 oldest live tickets; 3 are live, 2 of them ready"
    assert verdicts == [("3", "in the batch"), ("4", "in the batch"), ("5", "still generated")]
    assert outcome == "a batch of 2 stands: no lease has to wait"


def test_head_says_that_too_few_are_ready():
    _, verdicts, outcome = heads(row(3, State.HELD, 12), row(4, State.ISSUED, 12), row(5, State.ISSUED, 12))
    assert verdicts == [("3", "ready"), ("4", "waited for"), ("5", "waited for")]
    assert outcome == "no batch stands: 1 ready of the 2 that a step trains"


def test_head_says_that_others_would_expire():
    # Two are ready, but without the unfinished one of version 11, due now, it could never be trained.
    rows = [row(3, State.ISSUED, 11), row(4, State.HELD, 12), row(5, State.HELD, 12)]
    assert heads(*rows)[2] == (
        "no batch stands: without the tickets waited for, some would be over age before they could be trained"
    )
    lines = head_lines(stats({State.ISSUED: 1, State.HELD: 2}), replace(LIMITS, over_age="drop"), rows)
    assert lines[-1] == "a batch of 2 stands: no lease has to wait", "under `drop` nothing is waited for"


def test_head_in_strict_order_names_what_comes_first_and_what_came_back():
    rows = [row(3, State.HELD, 12), row(4, State.ISSUED, 12), row(5, State.HELD, 12), row(6, State.HELD, 12)]
    counts = {State.ISSUED: 1, State.HELD: 3, State.RETURNED: 1}
    strict = replace(LIMITS, lookahead=1.0)
    shown = head_lines(stats(counts), strict, rows, returned=row(2, State.RETURNED))
    assert shown[-1] == "no batch stands: strictly in order (buffer.lookahead 1) come first 2, 4"
    assert head_lines(stats(counts), LIMITS, rows)[-1] == "a batch of 2 stands: no lease has to wait"


def test_head_of_a_buffer_without_a_collector():
    assert heads(row(3, State.HELD, 12))[2] == "no batch stands: 1 ready of the 2 that a step trains"


def test_head_of_an_empty_buffer():
    assert heads()[2] == "nothing is issued or held"
    assert head_lines(stats(phase="ended"), LIMITS, []) == ["the run has ended: there is no next step"]


def test_a_held_ticket_has_its_age_its_facts_and_its_timeline(make_group, make_trajectory):
    held = row(7, State.HELD, 12, attempt=1, losses=1, times={"issued": 10.0, "put": 14.5})
    group = to_batch(make_group(make_trajectory("q", [(b"a", 12)])))
    found = Found(7, {}, stats({State.HELD: 1}), LIMITS, held, group)
    assert ticket_lines(found) == [
        "ticket 7   held, attempt 1",
        "went back  1 collectors lost, 0 times over age",
        "age        0 at the next step, at most 1; due 1 later",
        "task       reverse, row train-7",
        "made by    collector-0, engine collector-0/0: temperature 1",
        "",
        f"issued       {clock(10.0)}",
        f"first token  {clock(11.0)}  +1.00 s",
        f"done         {clock(12.0)}  +1.00 s",
        f"scored       {clock(13.0)}  +1.00 s",
        f"put          {clock(14.5)}  +1.50 s",
        "in all       4.50 s",
    ]


@pytest.mark.parametrize(
    ("found", "first"),
    [
        (Found(7, {}, stats(), LIMITS), "ticket 7  its row has left the store for the archive's ledger"),
        (Found(7, {}, stats(), LIMITS, row(7, State.STALE, reason="over_age")), "ticket 7  stale, over_age, attempt 0"),
        (Found(7, {}, stats(), LIMITS, row(7, State.ISSUED, 12)), "ticket 7      issued, attempt 0"),
        (Found(7, {}, trained=Weights(1, 8), without="store away"), "ticket 7    trained"),
    ],
)
def test_a_ticket_without_a_group_says_what_became_of_it(found, first):
    assert ticket_lines(found)[0] == first


def test_a_ticket_from_the_archive_alone_says_so_and_when_it_was_trained(make_group, make_trajectory):
    group = to_batch(make_group(make_trajectory("q", [(b"a", 8)])))
    shown = ticket_lines(Found(7, {}, group=group, trained=Weights(1, 8), trained_at=20.0, without="store away"))
    assert "trained by  the step from version 8 of lineage 1" in shown
    assert "from        the archive alone: store away" in shown
    assert f"trained      {clock(20.0)}  +5.50 s" in shown
