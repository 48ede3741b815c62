"""What a person reads of an evaluation: on a terminal and in a file, whatever the model wrote."""

from __future__ import annotations

import io
from typing import Any

import pytest

from asyncrl.collectors.evaluation.compared import comparison
from asyncrl.collectors.evaluation.report import report
from asyncrl.runtime.gate import gated
from asyncrl.runtime.gate_rules import read_rules
from asyncrl.telemetry.evaluation import render

SAMPLING = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "max_tokens": 8}


def answers(right: int, *, wrong: str) -> list[dict[str, Any]]:
    return [
        {
            **{"task": f"t\x1b[2J{n % 2}", "row_id": str(n), "sample": 0, "prompt": f"p{n}", "expected": "x"},
            **{"answer": "\x1b]0;title\x07\u202e", "reward": float(n < right), "parts": {"exact": float(n < right)}},
            **{"failure": "", "wrong": "" if n < right else wrong, "finish_reason": "stop", "tokens": 3},
            **{"latency_s": 0.5, "verifier_s": None, "difficulty": n // 4},
        }
        for n in range(8)
    ]


def document() -> dict[str, Any]:
    sides = [answers(8, wrong=""), answers(1, wrong="malformed")]
    numbers: dict[str, Any] = {"ks": [1], "pass_above": 0.0, "seed": 0}
    ours, theirs = (
        {"target": name, "answers": side, "report": report(side, samples=1, **numbers)}
        for name, side in zip(("new", "old"), sides, strict=True)
    )
    found = {**ours, "sampling": SAMPLING, "against": theirs, "difference": comparison(*sides, **numbers)}
    return {**found, "gate": gated(read_rules("default; reward > 1"), found)}


def rendered(*, terminal: bool) -> str:
    file = io.StringIO()
    render(document(), terminal=terminal, file=file)
    return file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_all_of_it_is_shown(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    said = rendered(terminal=terminal)
    for part in ("wrong/malformed", "solved by against", "difficulty", "one sample each", "malformed", "right"):
        assert part in said
    for part in ("better 'p1'", "+1.000", "fails: 3 of 9", "reward > 1", "holds"):
        assert part in said


def test_what_a_model_or_a_task_is_called_moves_no_cursor() -> None:
    said = rendered(terminal=False)
    assert "\x1b" not in said
    assert "\x07" not in said
    assert "\u202e" not in said
    assert "t\\x1b[2J0" in said
