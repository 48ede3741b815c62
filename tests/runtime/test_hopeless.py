"""A run of which no group can be used ends with the reason, and no other one does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffers.base import State, Stats
from asyncrl.runtime.hopeless import causes, nothing_usable

LIMIT_S = 120.0


def stats(states: Mapping[State, int]) -> Stats:
    """A snapshot in which only the states and the reason of the failed ones mean anything."""
    values: dict[str, Any] = {field.name: None for field in dataclasses.fields(Stats)}
    reasons = {"failed/unscored/verifier_invalid": states.get(State.FAILED, 0)}
    return Stats(**{**values, "states": states, "reasons": reasons})


@pytest.mark.parametrize(
    "states",
    [
        {State.FAILED: 31, State.ISSUED: 16},
        {State.FAILED: 500, State.HELD: 1},
        {State.FAILED: 500, State.TRAINED: 16},
        {State.FAILED: 500, State.LEASED: 16},
        {State.FAILED: 500, State.STALE: 1},
    ],
)
def test_there_is_hope_while_few_were_tried_or_one_was_usable(states: Mapping[State, int]) -> None:
    assert nothing_usable(stats(states), groups_per_step=16) == ""


def test_there_is_none_when_all_of_two_steps_groups_failed() -> None:
    said = nothing_usable(stats({State.FAILED: 32, State.ISSUED: 16, State.RETURNED: 2}), groups_per_step=16)
    assert said == "not one of the first 32 groups could be used: failed/unscored/verifier_invalid 32"


def test_the_causes_are_the_verifiers_own_words(tmp_path: Path) -> None:
    log = tmp_path / "collector-0.log"
    log.write_text(
        "2026-01-01 00:00:00,000 INFO asyncrl.collectors.service: ready\n"
        "2026-01-01 00:00:01,000 WARNING asyncrl.rewards.scoring: verifier_raised: ValueError: no (task.py:3)\n"
        "2026-01-01 00:00:02,000 WARNING asyncrl.collectors.service: ticket 1 attempt 0: data\n"
    )
    assert causes(log) == ["verifier_raised: ValueError: no (task.py:3)"]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_score_that_is_wrong_for_every_answer_ends_the_run_with_its_cause(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "lists.py").write_text(
        "from asyncrl.tasks.base import Row\n"
        "class Lists:\n"
        "    def rows(self, split): return [Row(f'{split}-{n}', f'reverse {n}') for n in range(100, 140)]\n"
        "    def score(self, row, answer): return [1.0, 0.0]\n"
    )
    changes = ["task={type: 'lists:Lists'}", "collector.max_unscored=null"]  # which ends a run sooner
    run = start("-P", "-m", "asyncrl.cli.main", "run", *(f"--set={change}" for change in changes), cwd=tmp_path)
    _, errors = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 1, errors
    first, cause, place = errors.splitlines()
    assert first.startswith("Error: not one of the first ")
    assert first.endswith(tuple(f"failed/unscored/verifier_invalid {n}" for n in range(32, 2000)))
    assert cause.startswith("verifier_invalid: score returned 2 values (list); it is called once for each answer: ")
    assert place.endswith("collector-0.log")
