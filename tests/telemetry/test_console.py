"""What is shown of a run, as exact strings."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.console import Console

from asyncrl.telemetry import text
from asyncrl.telemetry.console import FULL_WIDTH, RunConsole, panel, panel_rows

STATS: dict[str, Any] = {
    "states": {"held": 1, "leased": 16, "issued": 8},
    "reasons": {"stale/over_age": 2},
    "version": 5,
    "members": [
        {"name": "collector-0", "alive": True, "serving": (1, 4)},
        {"name": "collector-1", "alive": True, "serving": None},
        {"name": "collector-2", "alive": False, "serving": (1, 3)},
    ],
    "waiting": {"reason": "step 5 waits for tickets 81, 83 of collector-0"},
}


def step(number: int, **changes: Any) -> dict[str, Any]:
    record = {
        "step": number,
        "version": number,
        "step_s": 0.8,
        "wait_s": 0.32,
        "reward/mean": number / 10,
        "tokens_per_s": 1840.0,
        "tokens_total": 1000 * number,
        "buffer": {"held": 3, "leased": 0, "issued": 16},
        "age/tokens": {"0": 81, "1": 19},
        "ess": 0.987,
        "kl": 0.0123,
        "clip_fraction": 0.08,
        "pass_rate": [2, 0, 0, 4, 0, 0, 0, 0, 0, 0, 1],
        "zero_variance": 0.25,
        "lost": {},
        "collectors": {"collector-0": number - 1},
        "waiting": "",
        "skipped": False,
    }
    return {**record, **changes}


LINE = (
    "step  1/60  left    0:47  reward  0.100  tokens/s 1.8k  held   3  leased   0  in-flight  16  ess 0.987  wait  40%"
    "  age 0:81% 1:19%  lost -  serves collector-0:0"
)


def test_without_a_terminal_each_step_is_exactly_one_plain_line() -> None:
    file = io.StringIO()
    console = RunConsole(60, terminal=False, file=file)
    console.note("store up")
    console.on_stats(STATS)
    console.on_record(step(1))
    console.on_record({"event": "eval", "version": 0, "success": 0.203, "n": 128})
    console.on_record(step(2))
    console.on_stats(STATS)
    console.close()
    lines = file.getvalue().splitlines()
    assert lines[:3] == ["store up", LINE, "eval: version 0 has success 0.203 on 128 held-out rows"]
    assert lines[3].startswith("step  2/60  ")
    assert len(lines) == 4
    assert file.getvalue().isascii()


def test_columns_of_plain_lines_align_whatever_the_values() -> None:
    lines = [
        text.step_line(step(1), max_steps=100, left_s=59),
        text.step_line(
            step(100, **{"reward/mean": -0.25, "tokens_per_s": 3.4e6, "ess": None, "wait_s": 0.0}),
            max_steps=100,
            left_s=3725,
        ),
        text.step_line({"step": 7}, max_steps=100, left_s=None),
    ]
    assert len({line.index("  age ") for line in lines}) == 1
    assert len({line.index("  tokens/s ") for line in lines}) == 1


def test_a_skipped_step_and_a_wait_are_said() -> None:
    line = text.step_line(step(3, skipped=True, waiting="ticket 7 of a"), max_steps=60, left_s=1)
    assert line.endswith("serves collector-0:2  waits: ticket 7 of a  SKIPPED: non-finite gradient")


def test_a_step_with_nothing_known_but_its_number_is_shown() -> None:
    assert text.step_line({"step": 1}, max_steps=9, left_s=None) == (
        "step 1/9  left       -  reward      -  tokens/s    -  held   -  leased   -  in-flight   -"
        "  ess     -  wait    -"
        "  age -  lost -  serves -"
    )


def rows_of(records: list[Any], stats: dict[str, Any], *, ascii_only: bool = False) -> dict[str, str]:
    rows = panel_rows(records, stats, max_steps=60, room=50, ascii_only=ascii_only)
    return {name: value.plain.rstrip() for name, value in rows}


def test_the_panel_shows_everything_asked_for() -> None:
    assert rows_of([step(1), step(2, skipped=True)], {}) == {
        "step": "2/60    ━━━━━━━━━━━━━━━━  0:46 left  1 skipped (non-finite gradient)",
        "reward": "0.200   ▁█",
        "groups": "all wrong ▅  █      ▃ all right   25% without gradient",
        "tokens/s": "1.8k    ▁▁                2.0k trained so far",
        "age": "0 ━━━━━━━━━━━━━━━━━ 81%  1 ━━━━ 19%",
        "off-policy": "ess 0.987   kl 0.0123   clipped 8%",
        "buffer": "16 in flight   3 held   0 leased",
        "lost": "nothing",
        "weights": "learner:2   collector-0:1",
        "waiting": "-",
        "price": "waited 40%",
        "advice": "collector-bound, learner waits 40%: add collectors, slots or age",
    }


def test_a_snapshot_between_steps_is_newer_than_the_last_record() -> None:
    rows = rows_of([step(2)], STATS)
    assert rows["buffer"] == "8 in flight   1 held   16 leased"
    assert rows["lost"] == "stale/over_age:2"
    assert rows["weights"] == "learner:5   collector-0:4   collector-1:-"
    assert rows["waiting"] == "step 5 waits for tickets 81, 83 of collector-0"
    rows = rows_of([step(2, waiting="old news")], {**STATS, "waiting": None})
    assert rows["waiting"] == "-"


def test_collectors_that_may_start_nothing_are_said_to_wait_for_the_learner() -> None:
    full = {"issued": 0, "held": 16, "leased": 16}
    assert rows_of([step(2, buffer=full)], {})["waiting"].startswith("collectors wait for the learner's step")
    assert rows_of([step(2, buffer=full, waiting="ticket 7 of a")], {})["waiting"] == "ticket 7 of a"
    assert rows_of([step(60, buffer=full)], {})["waiting"] == "-", "the run has ended"


def test_before_the_first_step_the_panel_shows_what_the_store_knows() -> None:
    rows = rows_of([], STATS, ascii_only=True)
    assert rows["step"] == "0/60    ----------------  - left"
    assert rows["buffer"] == "8 in flight   1 held   16 leased"
    assert rows["advice"] == "-"


def test_no_line_of_the_panel_wraps_or_is_longer_than_the_terminal() -> None:
    records = [step(number, **{"tokens_per_s": 1e6, "tokens_total": 10**9}) for number in range(1, 101)]
    for width in (80, FULL_WIDTH, 200):
        file = io.StringIO()
        stats = {**STATS, "waiting": {"reason": "tickets 81, 83 of " + ", ".join(f"collector-{n}" for n in range(30))}}
        Console(file=file, width=width).print(panel(records, stats, max_steps=10_000, width=width))
        lines = file.getvalue().splitlines()
        assert len(lines) == 14, file.getvalue()
        assert {len(line) for line in lines} == {min(width, FULL_WIDTH)}


def test_a_console_that_had_nothing_to_show_leaves_the_terminal_alone() -> None:
    file = io.StringIO()
    console = RunConsole(60, terminal=True, file=file)
    console.close()
    assert file.getvalue() == ""


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_on_a_terminal_of_any_encoding_a_panel_is_drawn(encoding: str) -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    console = RunConsole(60, terminal=True, file=file)
    console.note("store up [not markup]")
    console.on_record(step(1))
    console.on_stats(STATS)
    console.close()
    file.flush()
    shown = raw.getvalue().decode(encoding)
    assert "store up [not markup]" in shown
    assert "0:47 left" in shown
    assert "step 5 waits for tickets 81, 83 of collector-0" in shown
    assert ("━" in shown) == (encoding == "utf-8")


def test_a_sparkline_runs_from_the_lowest_to_the_highest_value_shown() -> None:
    assert text.sparkline([float(n) for n in range(8)]) == "▁▂▃▄▅▆▇█"
    assert text.sparkline([9.0, 0.0, 1.0], width=2) == "▁█"
    assert text.sparkline([0.5, 0.5]) == "▁▁"
    assert text.sparkline([math.nan, 1.0, None]) == " ▁ "
    assert text.sparkline([]) == text.sparkline([math.nan]) == ""
    assert text.sparkline([0.0, 1.0], blocks=text.ASCII_BLOCKS) == "_#"


def test_counts_stay_within_four_characters() -> None:
    assert [text.count(n) for n in (999.4, 999.6, 9949, 9960, 999_499, 999_600, 2.5e9)] == [
        "999",
        "1.0k",
        "9.9k",
        "10k",
        "999k",
        "1.0M",
        "2.5G",
    ]


def test_ages_are_ordered_as_numbers() -> None:
    assert text.shares({"10": 1, "2": 1}) == "2:50% 10:50%"
    assert text.bars({"10": 1, "2": 3}, width=4, block="#") == "2 ### 75%  10 # 25%"
    assert text.bars({}) == "-"


def test_time_left_follows_the_last_steps() -> None:
    records = [step(n, step_s=100.0) for n in range(1, 4)] + [step(n, step_s=2.0) for n in range(4, 24)]
    assert text.time_left(records, 33) == 20.0
    assert text.time_left(records, 10) == 0
    assert text.time_left([], 10) is None


def test_advice_depends_on_the_share_of_waiting() -> None:
    def of(share: float) -> str:
        return text.advice([{"wait_s": share, "step_s": 1.0}])

    assert of(0.62) == "collector-bound, learner waits 62%: add collectors, slots or age"
    assert of(0.03) == "learner-bound, learner waits 3%: only a faster step helps"
    assert of(0.2) == "balanced, learner waits 20%"
    assert text.advice([]) == "-"
    assert text.wait_share([{"wait_s": 1.0, "step_s": 4.0}, {"wait_s": 0.0, "step_s": 6.0}]) == 0.1
    assert text.wait_share([{"wait_s": None}]) is None


COSTLY = {
    "tokens": 300,
    "step_lost": {"stale/over_age": 3, "returned/over_age": 1},
    "step_lost_tokens": {"stale/over_age": 80, "returned/over_age": 20},
    "step_lost_seconds": {"stale/over_age": 2.0, "returned/over_age": 0.5},
}


def test_what_is_thrown_away_is_in_the_price_and_in_the_advice() -> None:
    records = [step(1, **COSTLY), step(2, tokens=100, tokens_masked=25)]
    rows = rows_of(records, {})
    assert rows["price"].startswith("waited 40%; lost 3 groups, redid 1: 100 tokens")
    said = "waited 40%; lost 3 groups, redid 1: 100 tokens, 2.5 s of collectors"
    assert text.price(text.price_of(records)) == f"{said}; masked 25 tokens"
    assert text.advice(records) == (
        "collector-bound, learner waits 40%, 24% of the tokens are thrown away (stale/over_age): "
        "more age, or over_age wait, keeps them"
    )
    line = text.step_line(records[0], max_steps=60, left_s=None)
    assert line.endswith(f"  price: {said}")
    assert "price" not in text.step_line(step(3), max_steps=60, left_s=None)


def test_events_read_as_lines() -> None:
    assert text.event_line({"event": "eval", "version": 3, "success": None, "n": 4, "unscored": 2}) == (
        "eval: version 3 has success - on 4 held-out rows, 2 unscored"
    )
    assert text.event_line({"event": "checkpoint", "version": 20, "path": "runs/x/20", "time": 1.0}) == (
        "checkpoint: version 20, path runs/x/20"
    )
    assert text.event_line({"event": "end"}) == "end"
