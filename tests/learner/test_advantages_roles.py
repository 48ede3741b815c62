"""Whatever is compared with what: what must not happen is no success, and never to an answer's advantage."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.convert import convert
from asyncrl.learners.advantages import Kind, _gdpo, advantages
from asyncrl.rewards.shaping import Rule

NUMBERS = st.sampled_from([0.0, 0.25, 0.5, 1.0])
MEMBERS = st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), min_size=1, max_size=6)
"""Of each: right, well formed, unsafe."""
WEIGHTS = st.tuples(*[st.sampled_from([0.0, 0.5, 1.0, 3.0])] * 3)
KINDS: tuple[Kind, ...] = ("group-mean-std", "group-mean", "leave-one-out")
RULE = Rule(frozenset({"form"}), frozenset({"unsafe"}))


def parts_of(member: tuple[float, float, bool]) -> dict[str, float | None]:
    right, form, unsafe = member
    return {"right": right, "form": form, "unsafe": -1.0 if unsafe else 0.0}


def task_with(weights: dict[str, float]) -> Any:
    roles = {"right": "outcome", "form": "constraint", "unsafe": "violation"}
    parts = [
        {"type": "function", "function": "a:b", "name": name, "role": role, "weight": weights[name]}
        for name, role in roles.items()
    ]
    return convert({"task": {"type": "reverse", "rewards": parts}}).task


@given(MEMBERS, WEIGHTS, st.sampled_from([*KINDS, "gdpo"]), st.data())
def test_of_two_answers_that_differ_in_a_violation_alone_it_never_helps(
    members: list[tuple[float, float, bool]], given_weights: tuple[float, ...], kind: Any, data: st.DataObject
) -> None:
    right, form, _ = data.draw(st.sampled_from(members))
    group = [*members, (right, form, False), (right, form, True)]
    weights = dict(zip(("right", "form", "unsafe"), given_weights, strict=True))
    parts = [parts_of(member) for member in group]
    rewards = np.array([RULE.reward(found, weights) for found in parts])
    groups = np.zeros(len(group), np.int64)
    if kind == "gdpo":
        told = [list(found.items()) for found in parts]
        values = _gdpo(rewards, groups, told, [task_with(weights)] * len(group)).values
    else:
        values = advantages(rewards, groups, kind).values
    assert np.isfinite(values).all()
    assert values[-1] <= values[-2]
    if weights["unsafe"] > 0:
        assert values[-1] < values[-2]


@given(MEMBERS, WEIGHTS)
def test_an_answer_with_a_violation_is_no_success_whatever_else_it_earned(
    members: list[tuple[float, float, bool]], given_weights: tuple[float, ...]
) -> None:
    weights = dict(zip(("right", "form", "unsafe"), given_weights, strict=True))
    for right, form, unsafe in members:
        outcome = RULE.outcome(parts_of((right, form, unsafe)), weights)
        assert outcome == (0.0 if unsafe else weights["right"] * right)


@pytest.mark.parametrize("kind", KINDS)
@given(MEMBERS, st.sets(st.integers(0, 5)))
def test_an_unscored_member_of_gdpo_changes_nothing_for_the_others(
    kind: Kind, members: list[tuple[float, float, bool]], missing: set[int]
) -> None:
    """Also where some of its parts have a number: its reward has none, and so it is not compared."""
    weights = {"right": 1.0, "form": 0.5, "unsafe": 2.0}
    task = task_with(weights)
    parts = [parts_of(member) for member in members]
    scored = [n for n in range(len(members)) if n not in missing]
    told = [list(({**found, "right": None} if n in missing else found).items()) for n, found in enumerate(parts)]
    rewards = np.array([math.nan if n in missing else RULE.reward(parts[n], weights) for n in range(len(parts))])

    def both(chosen: list[int]) -> list[np.ndarray]:
        some, groups = rewards[chosen], np.zeros(len(chosen), np.int64)
        by_part = _gdpo(some, groups, [told[n] for n in chosen], [task] * len(chosen)).values
        return [by_part, advantages(some, groups, kind).values]

    for whole, alone in zip(both(list(range(len(parts)))), both(scored), strict=True):
        assert whole[scored] == pytest.approx(alone)
        assert not whole[sorted(missing & set(range(len(parts))))].any()
