"""The last screen of a run: eleven lines, three prompts, as exact strings."""

from __future__ import annotations

import io
from typing import Any

import pytest

from asyncrl.telemetry.summary import prompt_rows, render, summary_rows

SUMMARY: dict[str, Any] = {
    "steps": 60,
    "seconds": 48.2,
    "tokens": 123456,
    "reward_first20": 0.31,
    "reward_last20": 0.93,
    "success_before": 0.203,
    "success_after": 0.953,
    "eval_n": 128,
    "prompts": [
        {"prompt": f"reverse 12{n}", "before": f"12{n}", "after": f"{n}21", "expected": f"{n}21"} for n in range(5)
    ],
    "lost": {"stale/run_end": 7, "failed/data": 1},
    "price": {
        "waited": 0.2,
        "groups": 8,
        "again": 2,
        "tokens": 4321,
        "seconds": 12.5,
        "masked": 0,
    },
    "lost_length_ratio": 1.26,
    "age_max": 1,
    "age_mean": 0.4,
    "learner_wait_share": 0.2,
    "checkpoint": "runs/x/checkpoints/60",
    "archive": "runs/x/archive",
    "metrics": "runs/x/metrics.jsonl",
    "resolved_recipe": "runs/x/recipe.yaml",
    "stopped": False,
}

PLAIN = """\
run         finished: 60 steps in 0:48; the learner waited 20% of it
success     0.203 -> 0.953 on 128 held-out rows
reward      0.310 in the first 20 steps -> 0.930 in the last 20
tokens      123,456 trained, 2.6k a second
age         0.40 on average, 1 at most
price       waited 20%; lost 8 groups, redid 2: 4.3k tokens, 12.5 s of collectors
lost        8 groups, 1.26 x as long as trained ones: stale/run_end:7, failed/data:1
recipe      runs/x/recipe.yaml
metrics     runs/x/metrics.jsonl
archive     runs/x/archive
checkpoint  runs/x/checkpoints/60
prompt 'reverse 120': '120' -> '021' (expected '021')
prompt 'reverse 121': '121' -> '121' (expected '121')
prompt 'reverse 122': '122' -> '221' (expected '221')
"""


def test_without_a_terminal_the_summary_is_eleven_plain_lines_and_three_prompts() -> None:
    file = io.StringIO()
    render(SUMMARY, terminal=False, file=file)
    assert file.getvalue() == PLAIN


def test_on_a_terminal_the_same_values_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    file = io.StringIO()
    render(SUMMARY, terminal=True, file=file)
    shown = file.getvalue()
    for _, value in summary_rows(SUMMARY):
        assert value in shown
    assert "'reverse 122'" in shown
    assert "'reverse 123'" not in shown


def test_a_run_that_was_stopped_before_its_first_step_has_a_summary() -> None:
    rows = dict(summary_rows({"stopped": True, "steps": 0, "seconds": 0.0, "tokens": 0, "success_before": None}))
    assert rows["run"] == "stopped early, resume with --resume: 0 steps in 0:00; the learner waited - of it"
    assert rows["success"] == "- -> - on - held-out rows"
    assert rows["tokens"] == "0 trained, - a second"
    assert (rows["price"], rows["lost"]) == ("-", "nothing")
    assert rows["checkpoint"] == "-"


def test_prompts_are_kept_to_one_line_each() -> None:
    (row,) = prompt_rows([{"prompt": "a\nb", "before": "x" * 100, "after": None, "expected": ""}])
    assert row == (r"'a\nb'", "'" + "x" * 44 + "...", "-", "''")
