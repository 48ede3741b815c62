"""What was lost, from two snapshots, against numbers by hand."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.buffers.base import Lease, Stats
from asyncrl.learners.batch import BoundBroken, check_once
from asyncrl.learners.costs import empty_fills, lost_length_ratio, step_costs, use_metrics


def stats(**values: Any) -> Stats:
    """A snapshot in which only these values mean anything."""
    empty: dict[str, Any] = {field.name: {} for field in dataclasses.fields(Stats)}
    return Stats(**{**empty, "filtered_in_row": 0, **values})


BEFORE = stats(
    reasons={"stale/over_age": 2, "trained/trained": 8},
    returns={"over_age": 1},
    lost_tokens={"stale/over_age": 100, "returned/over_age": 10},
    lost_seconds={"stale/over_age": 1.0},
)
NOW = stats(
    reasons={"stale/over_age": 5, "trained/trained": 16, "filtered/zero_variance": 1, "forfeited/over_age": 4},
    returns={"over_age": 2, "member_lost": 1},
    lost_tokens={"stale/over_age": 250, "returned/over_age": 30, "filtered/zero_variance": 7},
    lost_seconds={"stale/over_age": 1.5},
    lost_length={
        "stale/over_age": 50.0,
        "returned/over_age": 20.0,
        "filtered/zero_variance": 1.0,
        "trained/trained": 20.0,
    },
    lost_reward={"stale/over_age": 0.25},
    members=[SimpleNamespace(progress={"cancelled_s": 2.0}), SimpleNamespace(progress={})],
)


def test_a_steps_cost_is_what_the_sums_grew_by() -> None:
    costs = step_costs(BEFORE, NOW)
    assert costs["step_lost"] == {
        "stale/over_age": 3,
        "filtered/zero_variance": 1,
        "returned/over_age": 1,
        "returned/member_lost": 1,
    }
    assert costs["step_lost_tokens"] == {"stale/over_age": 150, "returned/over_age": 20, "filtered/zero_variance": 7}
    assert costs["step_lost_seconds"] == {"stale/over_age": 0.5, "cancelled": 2.0}
    assert costs["lost"] == {"stale/over_age": 5, "filtered/zero_variance": 1}
    assert costs["returns"] == {"over_age": 2, "member_lost": 1}
    taken_back = step_costs(NOW, BEFORE)  # a new lineage returned what had ended
    assert taken_back["step_lost"] == taken_back["step_lost_tokens"] == {}


def test_the_length_of_lost_answers_is_that_of_all_that_were_lost_for_their_age() -> None:
    assert lost_length_ratio(NOW) == pytest.approx((5 * 50 + 2 * 20) / 7 / 20)
    assert lost_length_ratio(BEFORE) is None


@pytest.mark.parametrize(
    ("reward", "cause"),
    [
        (0.0, "no answer is rewarded"),
        (1.0, "every answer is right"),
        (0.4, "solved by every answer and the others by none"),
    ],
)
def test_a_batch_that_is_never_filled_is_explained_by_what_was_filtered_since(reward: float, cause: str) -> None:
    before = stats(reasons={"filtered/zero_variance": 10}, lost_reward={"filtered/zero_variance": 0.5})
    mean = (10 * 0.5 + 30 * reward) / 40
    now = stats(
        reasons={"filtered/zero_variance": 40}, lost_reward={"filtered/zero_variance": mean}, filtered_in_row=30
    )
    assert empty_fills(before, now, limit=31) == ""
    said = empty_fills(before, now, limit=30)
    assert said.startswith("the last 30 groups were all left out")
    assert cause in said
    assert f"of {reward:.3g} on average" in said


def test_groups_that_were_filtered_before_this_learner_do_not_count() -> None:
    reasons = {"reasons": {"filtered/zero_variance": 40}, "lost_reward": {"filtered/zero_variance": 0.0}}
    old = stats(**reasons, filtered_in_row=40)
    assert empty_fills(old, stats(**reasons, filtered_in_row=60), limit=30) == ""
    assert empty_fills(old, stats(**reasons, filtered_in_row=70), limit=30) != ""
    assert empty_fills(old, stats(**reasons, filtered_in_row=30), limit=30) != ""  # one was kept in between


def test_the_uses_of_a_batch_are_counted() -> None:
    found = use_metrics(Lease(1, 4, 0, (3, 5, 8, 9), (), (1, 0, 0, 1)))
    assert (found["uses"], found["fresh"]) == ({"0": 2, "1": 2}, 0.5)
    assert use_metrics(Lease(1, 4, 0, (), (), ()))["fresh"] is None


def test_a_step_trains_no_ticket_twice() -> None:
    check_once((3, 1, 2))
    with pytest.raises(BoundBroken, match="a ticket twice"):
        check_once((3, 1, 3))
