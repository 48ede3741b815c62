"""The last screen of a run: eleven lines, three prompts, as exact strings."""

from __future__ import annotations

import io
from typing import Any

import pytest

from asyncrl.learners.summary import reward_ends
from asyncrl.telemetry.summary import prompt_rows, render, summary_rows

SUMMARY: dict[str, Any] = {
    "steps": 60,
    "seconds": 48.2,
    "tokens": 123456,
    "reward_first": 0.31,
    "reward_last": 0.93,
    "reward_window": 20,
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
    "logs": "runs/x/logs",
    "stopped": False,
}

PLAIN = """\
run         finished: 60 steps in 0:48; the learner waited 20% of it
success     0.203 -> 0.953 on 128 held-out rows
reward      0.310 in the first 20 steps -> 0.930 in the last 20
tokens      123,456 trained, 2.6k a second
age         0.40 on average, 1 at most
price       waited 20%; lost 8 groups, redid 2: 4.3k tokens, 12.5 s of collectors
lost        8 groups, 1.26 x as long as trained ones: stale/run_end:7, failed/data:1; why they failed: runs/x/logs
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
    monkeypatch.setenv("COLUMNS", "140")
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


@pytest.mark.parametrize(
    ("steps", "shown"),
    [
        (100, "9.500 in the first 20 steps -> 89.500 in the last 20"),
        (40, "9.500 in the first 20 steps -> 29.500 in the last 20"),
        (11, "2.000 in the first 5 steps -> 8.000 in the last 5"),
        (2, "0.000 in the first step -> 1.000 in the last"),
        (1, "0.000 in the first step -> 0.000 in the last"),
        (0, "- in the first step -> - in the last"),
    ],
)
def test_no_step_of_a_short_run_is_among_its_first_and_its_last(steps: int, shown: str) -> None:
    assert dict(summary_rows(reward_ends([float(step) for step in range(steps)])))["reward"] == shown


@pytest.mark.parametrize(
    ("lost", "logs", "shown"),
    [
        (
            {"failed/unscored/verifier_raised": 3},
            None,
            "verifier_raised:3; why they failed: in the logs of the collectors",
        ),
        ({"stale/age": 3}, "runs/x/logs", "3 groups: stale/age:3"),
    ],
)
def test_where_the_cause_of_failures_is_said_stands_beside_them(
    lost: dict[str, int], logs: str | None, shown: str
) -> None:
    assert dict(summary_rows({"lost": lost, "logs": logs}))["lost"].endswith(shown)


def test_a_run_that_went_on_is_as_fast_as_its_last_learner_was() -> None:
    rows = dict(summary_rows({**SUMMARY, "steps_now": 10, "seconds": 10.0, "tokens_now": 20000}))
    assert rows["run"].startswith("finished: 60 steps, 10 of them since it went on, in 0:10;")
    assert rows["tokens"] == "123,456 trained, 2.0k a second"
    whole = dict(summary_rows({**SUMMARY, "steps_now": 60, "seconds": 10.0, "tokens_now": 123456}))
    assert whole["run"].startswith("finished: 60 steps in 0:10;")


def test_prompts_are_kept_to_one_line_each() -> None:
    (row,) = prompt_rows([{"prompt": "a\nb", "before": "x" * 100, "after": None, "expected": ""}])
    assert row == (r"'a\nb'", "'" + "x" * 44 + "...", "-", "''")
