"""Control by the effective sample size: what it wants, how it moves, when it warns and stops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from asyncrl.config.recipe import Learner
from asyncrl.learners.notices import Notices, rate_changes
from asyncrl.learners.optimize import Optimizer, Updates
from asyncrl.learners.pace import (
    FLOOR,
    HEALTHY,
    TOLERANCE,
    EssCollapsed,
    Pace,
    after_measuring,
    after_step,
    wanted_scale,
)
from asyncrl.learners.watch import Watch

shares = st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=60)


def followed(measured: list[float], pace: Pace = Pace()) -> list[Pace]:  # noqa: B008  # frozen
    paces = []
    for ess in measured:
        pace = after_measuring(pace, ess)
        paces.append(pace)
    return paces


@given(shares)
def test_the_factor_is_never_far_from_the_square_root_and_never_above_one(measured: list[float]) -> None:
    for ess, pace in zip(measured, followed(measured), strict=True):
        wanted = wanted_scale(min(ess, pace.average))
        assert abs(wanted / pace.scale - 1) < TOLERANCE
        assert math.sqrt(FLOOR) <= pace.scale <= 1.0
        assert ess >= HEALTHY or pace.scale <= math.sqrt(max(ess, FLOOR)) / (1 - TOLERANCE), "a fall counts at once"


@given(st.lists(st.floats(HEALTHY, 1.0), min_size=1, max_size=60))
def test_a_healthy_run_is_never_touched(measured: list[float]) -> None:
    assert {pace.scale for pace in followed(measured)} == {1.0}


@given(shares)
def test_the_average_forgets_and_the_rate_comes_back_to_that_of_the_recipe(measured: list[float]) -> None:
    *_, last = followed([*measured, *[1.0] * 40])
    assert last.scale == 1.0


@given(shares, shares)
def test_what_was_saved_goes_on_as_if_nothing_had_happened(before: list[float], after: list[float]) -> None:
    """To the bit: an average that was rounded on its way to disk would be another one."""
    whole = followed([*before, *after])
    assert followed(after, whole[len(before) - 1]) == whole[len(before) :]


def test_a_fall_is_acted_upon_at_once_and_a_rise_once_it_lasts() -> None:
    scales = [pace.scale for pace in followed([1.0, 0.25, 1.0, *[0.25] * 10, *[1.0] * 3])]
    assert scales[:3] == [1.0, 0.5, 1.0], "one bad batch costs one update"
    assert scales[3:13] == [0.5] * 10
    assert all(scale < 0.9 for scale in scales[13:]), "three good ones after ten bad ones are not trusted yet"


def test_low_steps_are_counted_in_a_row_and_nothing_measured_counts_neither_way() -> None:
    pace = Pace()
    for ess, low in ((0.05, 1), (0.01, 2), (None, 2), (0.05, 3), (0.5, 0), (0.05, 1)):
        pace = after_step(pace, ess, limit=None)
        assert pace.low == low
    assert after_step(pace, 0.3, limit=0.4).low == 2


def an_optimizer(**options: object) -> Optimizer:
    torch.manual_seed(0)
    return Optimizer(nn.Linear(2, 2), Learner(learning_rate=0.5, warmup_steps=0, **options))


def a_step(optimizer: Optimizer, *measured: float | None, gradient: float = 1.0) -> Updates:
    updates = []
    for ess in measured:
        for p in optimizer._parameters:
            p.grad = torch.full_like(p, gradient)
        updates.append(optimizer.update(1, denominator=1.0, ess=ess))
    done = Updates(tuple(updates), ess=measured[-1])
    optimizer.ended(done)
    return done


def test_the_factor_is_that_of_the_update_whose_answers_were_measured() -> None:
    optimizer = an_optimizer(rate_by_ess=True)
    updates = a_step(optimizer, 0.95, 0.49, 0.5)
    assert [update.learning_rate for update in updates.each] == pytest.approx([0.5, 0.35, 0.35])
    assert updates.learning_rate == pytest.approx(0.4)
    (event,) = rate_changes(updates)
    assert (event["update"], event["scale_before"], event["scale"], event["ess"]) == (2, 1.0, 0.7, 0.49)
    assert event["average"] == pytest.approx(0.9 * (0.9 + 0.1 * 0.95) + 0.1 * 0.49)
    assert optimizer._adam.param_groups[0]["lr"] == pytest.approx(0.35)


def test_without_the_key_no_share_changes_the_rate_and_no_average_moves() -> None:
    optimizer = an_optimizer()
    updates = a_step(optimizer, 0.02, 0.3)
    assert {update.learning_rate for update in updates.each} == {0.5}
    assert (optimizer.pace.scale, optimizer.pace.average, rate_changes(updates)) == (1.0, 1.0, [])


def test_a_skipped_update_moves_nothing() -> None:
    optimizer = an_optimizer(rate_by_ess=True)
    updates = a_step(optimizer, 0.25, gradient=math.nan)
    assert updates.skipped
    assert (optimizer.pace.scale, optimizer.pace.average, rate_changes(updates)) == (1.0, 1.0, [])


def test_a_resumed_optimizer_has_the_same_average_and_factor_to_the_bit() -> None:
    whole, first = an_optimizer(rate_by_ess=True), an_optimizer(rate_by_ess=True)
    before, after = [0.31, 0.07, 0.9123], [0.77, 0.61803, 0.05]
    for ess in before:
        a_step(whole, ess)
        a_step(first, ess)
    second = an_optimizer(rate_by_ess=True)
    second.load_state_dict(first.state_dict())
    rates = [[a_step(optimizer, ess).learning_rate for ess in after] for optimizer in (whole, second)]
    assert rates[0] == rates[1]
    assert whole.pace == second.pace
    forgetful = an_optimizer(rate_by_ess=True)  # control: one that begins its average again has other rates
    assert [a_step(forgetful, ess).learning_rate for ess in after] != rates[0]


BUDGET = {"step": 1, "tokens_per_microbatch": Learner().max_tokens_per_microbatch}


def test_a_collapse_ends_the_run_if_a_limit_is_set_and_is_warned_of_once_if_not() -> None:
    limited = an_optimizer(min_ess=0.3, max_low_ess_steps=2)
    limited.check_progress(a_step(limited, 0.2))
    with pytest.raises(EssCollapsed, match=r"below 0\.3 in 2 steps in a row, in the last 0\.123 .*\n.*learning_rate"):
        limited.check_progress(a_step(limited, 0.123))
    assert "set learner.rate_by_ess: true" in limited.collapse(a_step(limited, 0.1))
    scaled = an_optimizer(min_ess=0.3, max_low_ess_steps=1, rate_by_ess=True)
    assert "rate_by_ess" not in scaled.collapse(a_step(scaled, 0.1))

    told = []
    free = an_optimizer(max_low_ess_steps=2)
    notices = Notices(free._config, Watch({}))
    healthy = {"mismatch/age0": 0.0, "mismatch/age0_error": 1.0, "mismatch/age0_kl": 0.0, **BUDGET}
    for ess in (0.2, 0.05, 0.05, 0.05, 0.4, 0.05, 0.05):
        updates = a_step(free, ess)
        free.check_progress(updates)
        told.append([event["about"] for event in notices.of(healthy, updates, free)])
    assert told == [[], [], ["ess/sequence"], [], [], [], ["ess/sequence"]]


def test_a_mismatch_out_of_its_range_is_warned_of_once_with_its_numbers() -> None:
    optimizer = an_optimizer()
    notices, updates = Notices(optimizer._config, Watch({})), a_step(optimizer, None)
    unknown = {**dict.fromkeys(("mismatch/age0", "mismatch/age0_error", "mismatch/age0_kl")), **BUDGET}
    assert notices.of(unknown, updates, optimizer) == []
    bad = {"mismatch/age0": 0.7, "mismatch/age0_error": 1.08, "mismatch/age0_kl": 4e-4, **BUDGET}
    (event,) = notices.of(bad, updates, optimizer)
    assert (event["event"], event["about"]) == ("warning", "mismatch/age0")
    assert all(number in event["text"] for number in ("1.08", "1.05", "0.0004", "0.001", "0.7 nats", "model.dtype"))
    assert notices.of(bad, updates, optimizer) == []
