"""`bench weights`, collectors that come and go: what is planned for them, and a small one, with its control."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.benchmarks.weights_churn import QUIET, Setting, churned, plan, targets
from asyncrl.weights.base import Transport


@given(members=st.integers(2, 40), publications=st.integers(12, 300), seed=st.integers(0, 10))
def test_what_is_planned_can_be_done_and_leaves_somebody(members: int, publications: int, seed: int) -> None:
    present: set[str] = set()
    stopped: set[str] = set()
    acts = plan(members, publications, seed=seed)
    for act in acts:
        assert 0 <= act.after <= publications - QUIET
        match act.what:
            case "join":
                assert act.member not in present | stopped
                present.add(act.member)
            case "stop":
                present.remove(act.member)
                stopped.add(act.member)
            case "continue":
                stopped.remove(act.member)
                present.add(act.member)
            case _:
                present.remove(act.member)
        assert present
    assert not stopped, "nobody is left standing"
    assert max(Counter((act.what, act.member) for act in acts).values()) == 1


def test_the_benchmarks_own_plan_has_all_that_can_happen() -> None:
    counts = Counter(act.what for act in plan(16, 100))
    assert counts == {"join": 30, "kill": 5, "stop": 5, "continue": 5, "leave": 4}


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["collective", "file"])
def test_who_is_killed_or_stopped_holds_up_nobody_and_all_serve_what_was_published(
    transport: Transport,
) -> None:
    row = asyncio.run(churned(Setting(transport, 3, 30, damaged=6), say=lambda line: None))
    assert row["kills"]
    assert row["stops"]
    assert row["served"] > row["joins"], "weights went on coming"
    assert [target.name for target in targets([row]) if not target.met] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_bits_that_flip_while_nobody_checks_are_found() -> None:
    row = asyncio.run(churned(Setting("file", 2, 12, damaged=4, checked=False), say=lambda line: None))
    assert row["wrong"] > 0
    assert all(target.met for target in targets([row]))
