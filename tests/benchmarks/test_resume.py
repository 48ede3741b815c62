"""`bench resume`: what it kills, what it compares, what counts as equal."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from asyncrl.benchmarks.resume import AGE, CONTROLS, EVERY_STEPS, LAST, LOSING, VICTIMS, schedule, targets
from asyncrl.benchmarks.resume_left import Left, Trained, difference, digest_of

LEFT = Left(tuple(Trained((2 * n, 2 * n + 1), f"{n}") for n in range(3)), "weights", "optimizer", "random")


def test_kills_are_after_steps_of_their_own_and_never_so_late_that_the_run_has_ended() -> None:
    kills = schedule(10, seed=0)
    assert len({kill.after for kill in kills}) == 10
    assert all(1 <= kill.after <= LAST and 0 <= kill.part < 1 for kill in kills)
    assert Counter(kill.victim for kill in kills) == {
        victim: 10 * VICTIMS.count(victim) // len(VICTIMS) for victim in VICTIMS
    }
    assert kills != schedule(10, seed=1)
    assert kills[:2] == schedule(2, seed=0)


def test_controls_are_killed_where_something_is_lost() -> None:
    assert EVERY_STEPS + 1 < LOSING < 2 * EVERY_STEPS


@pytest.mark.parametrize(
    ("other", "bits", "found"),
    [
        (LEFT, True, ""),
        (replace(LEFT, weights="w"), True, "weights"),
        (replace(LEFT, optimizer="o"), True, "the optimizer"),
        (replace(LEFT, random="r"), True, "random numbers"),
        (replace(LEFT, weights="w", optimizer="o", random="r"), False, ""),
        (replace(LEFT, steps=(*LEFT.steps[:2], Trained((4, 5), "x"))), True, "tokens, log-probs or rewards of step 3"),
        (replace(LEFT, steps=(*LEFT.steps[:2], Trained((4, 5), "x"))), False, ""),
        (replace(LEFT, steps=(LEFT.steps[0], Trained((3, 2), "1"), LEFT.steps[2])), True, "prompts of step 2"),
        (replace(LEFT, steps=(LEFT.steps[0], Trained((3, 2), "1"), LEFT.steps[2])), False, ""),
        (replace(LEFT, steps=(LEFT.steps[0], Trained((3, 4), "1"), LEFT.steps[2])), False, "prompts of step 2"),
    ],
)
def test_the_first_difference_is_named(other: Left, bits: bool, found: str) -> None:
    assert difference(LEFT, other, bits=bits) == found


def test_a_digest_is_of_every_bit_and_of_the_order() -> None:
    state = {"adam": {0: {"exp_avg": torch.arange(4.0), "step": torch.tensor(3.0)}}, "steps": 3, "pace": {"scale": 1.0}}
    assert digest_of(state) == digest_of({**reversed_order(state)})
    one_bit = torch.arange(4.0)
    one_bit[3] = torch.nextafter(one_bit[3], torch.tensor(9.0))
    for other in (
        {**state, "adam": {0: {"exp_avg": one_bit, "step": torch.tensor(3.0)}}},
        {**state, "adam": {0: {"exp_avg": torch.arange(4.0).reshape(2, 2), "step": torch.tensor(3.0)}}},
        {**state, "steps": 4},
        {**state, "pace": {"scale": 1.0, "low": 0}},
        {"adam": state["adam"], "steps": 3},
    ):
        assert digest_of(other) != digest_of(state)
    assert digest_of([1, [2]]) != digest_of([[1], 2])


def reversed_order(state: dict[str, object]) -> dict[str, object]:
    return dict(reversed(state.items()))


def row(kind: str, age: int, *, equal: bool, resumed_from: int | None = 3) -> dict[str, object]:
    return {"kind": kind, "age": age, "killed_after": 5, "resumed_from": resumed_from, "equal": equal}


def test_targets_are_met_if_all_kills_are_equal_and_each_control_differs() -> None:
    controls = [row(control.name, control.age, equal=False) for control in CONTROLS]
    kills = [row("kill", 0, equal=True), row("kill", 0, equal=True, resumed_from=None), row("kill", AGE, equal=True)]
    assert all(target.met for target in targets([*kills, *controls]))
    for number in range(len(kills)):
        spoilt = [*kills[:number], {**kills[number], "equal": False}, *kills[number + 1 :]]
        assert sum(not target.met for target in targets([*spoilt, *controls])) == 1
    for number in range(len(controls)):
        passing = [*controls[:number], {**controls[number], "equal": True}, *controls[number + 1 :]]
        assert sum(not target.met for target in targets([*kills, *passing])) == 1
    nothing_lost = [{**one, "resumed_from": None} for one in [*kills, *controls]]
    assert [target.name for target in targets(nothing_lost) if not target.met] == [
        "steps that were lost and made again"
    ]
