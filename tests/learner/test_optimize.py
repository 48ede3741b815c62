"""The update: warm-up, mean of a sum, and the guard."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from asyncrl.config.recipe import Learner
from asyncrl.learners.optimize import Optimizer, TooManySkipped, Updates, learning_rate

CONFIG = Learner(learning_rate=0.1, warmup_steps=4, weight_decay=0.1, max_grad_norm=1e9)


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))


def set_gradients(model: nn.Module, value: float) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, value)


def snapshot(model: nn.Module, optimizer: Optimizer) -> tuple[dict, dict]:
    return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["adam"])


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def test_warm_up_rises_linearly_and_stays() -> None:
    assert [learning_rate(CONFIG, n) for n in range(6)] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])
    assert learning_rate(Learner(learning_rate=0.5, warmup_steps=0), 0) == 0.5


def test_the_accumulated_sum_becomes_a_mean_before_it_is_clipped() -> None:
    model = a_model()
    set_gradients(model, 6.0)
    elements = sum(p.numel() for p in model.parameters())
    assert Optimizer(model, CONFIG).step(tokens=3).grad_norm == pytest.approx(2.0 * math.sqrt(elements))


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])  # the last overflows in the norm only
def test_a_non_finite_gradient_changes_neither_weights_nor_optimizer(value: float) -> None:
    model = a_model()
    optimizer = Optimizer(model, CONFIG)
    set_gradients(model, 1.0)
    optimizer.step(tokens=1)
    before = snapshot(model, optimizer)
    set_gradients(model, 1.0)
    next(iter(model.parameters())).grad.fill_(value)
    update = optimizer.step(tokens=1)
    assert "norm" in update.skipped
    assert same(snapshot(model, optimizer), before)
    assert optimizer.updates == 1
    assert all(p.grad is None for p in model.parameters())  # nothing of it is left for the next step


def test_too_many_skipped_steps_in_a_row_end_the_run_and_a_good_one_resets_the_count() -> None:
    model = a_model()
    optimizer = Optimizer(model, CONFIG)
    for good in (False, False, True, False, False):
        set_gradients(model, 1.0 if good else math.nan)
        update = optimizer.step(tokens=1)
        assert bool(update.skipped) is not good
        optimizer.check_progress(update)
    set_gradients(model, math.nan)
    with pytest.raises(TooManySkipped, match="3 steps in a row changed nothing"):
        optimizer.check_progress(optimizer.step(tokens=1))


def a_step(model: nn.Module, optimizer: Optimizer, *values: float) -> Updates:
    """One of an update for each of these gradients."""
    updates = []
    for value in values:
        set_gradients(model, value)
        updates.append(optimizer.update(1, denominator=1.0))
    done = Updates(tuple(updates))
    optimizer.ended(done)
    return done


def test_all_updates_of_a_step_have_its_rate_and_the_warm_up_counts_steps() -> None:
    model = a_model()
    optimizer = Optimizer(model, CONFIG)
    rates = [update.learning_rate for _ in range(3) for update in a_step(model, optimizer, 1.0, 1.0, 1.0).each]
    assert rates == pytest.approx([0.025] * 3 + [0.05] * 3 + [0.075] * 3)
    state = optimizer.state_dict()
    assert (state["updates"], state["steps"]) == (9, 3)
    assert {int(moments["step"]) for moments in state["adam"]["state"].values()} == {9}


def test_a_step_is_skipped_if_none_of_its_updates_was_applied() -> None:
    model = a_model()
    optimizer = Optimizer(model, CONFIG)
    partly = a_step(model, optimizer, math.nan, 2.0, math.inf, 1.0)
    elements = sum(p.numel() for p in model.parameters())
    assert (partly.skipped, len(partly.applied), len(partly.each)) == ("", 2, 4)
    assert partly.grad_norm == pytest.approx(1.5 * math.sqrt(elements))
    assert (optimizer.updates, optimizer.steps, optimizer.skipped_in_a_row) == (2, 1, 0)

    before = snapshot(model, optimizer)
    for _ in range(2):
        optimizer.check_progress(a_step(model, optimizer, math.nan, math.nan))
    assert same(snapshot(model, optimizer), before)
    assert (optimizer.updates, optimizer.steps, optimizer.skipped_in_a_row) == (2, 1, 2)
    with pytest.raises(TooManySkipped, match="3 steps in a row changed nothing; the last: the gradient's norm is nan"):
        optimizer.check_progress(a_step(model, optimizer, math.nan, math.nan))


def test_a_gradient_of_zeros_is_an_update_by_momentum() -> None:
    model = a_model()
    optimizer = Optimizer(model, CONFIG)
    set_gradients(model, 1.0)
    optimizer.step(tokens=1)
    before = snapshot(model, optimizer)[0]
    set_gradients(model, 0.0)
    update = optimizer.step(tokens=1)
    assert (update.skipped, update.grad_norm) == ("", 0.0)
    assert not same(model.state_dict(), before)


def test_weight_decay_is_for_matrices_only() -> None:
    model = a_model()
    optimizer = Optimizer(model, CONFIG)
    before = copy.deepcopy(model.state_dict())
    set_gradients(model, 0.0)
    optimizer.step(tokens=1)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) is (p.ndim < 2)


def test_a_loaded_state_goes_on_exactly_with_rates_from_the_recipe(tmp_path) -> None:
    model = a_model()
    optimizer = Optimizer(model, CONFIG)
    for value in (1.0, -0.5, 0.3):
        set_gradients(model, value)
        optimizer.step(tokens=2)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    twin = copy.deepcopy(model)
    other = Optimizer(twin, CONFIG)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for value in (0.7, 0.1):
        set_gradients(model, value)
        set_gradients(twin, value)
        assert optimizer.step(tokens=2) == other.step(tokens=2)
    assert same(snapshot(model, optimizer), snapshot(twin, other))

    slower = Optimizer(copy.deepcopy(model), Learner(learning_rate=0.01, warmup_steps=0, weight_decay=0.3))
    slower.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    groups = slower.state_dict()["adam"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
