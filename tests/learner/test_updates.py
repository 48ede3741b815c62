"""A step of several updates: how its groups are split, and that every token weighs the same in whichever part it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from asyncrl.config.objective import Objective
from asyncrl.config.recipe import Learner, Recipe
from asyncrl.learners import step
from asyncrl.learners.batch import Batch
from asyncrl.learners.lora import served_weights
from asyncrl.learners.model import load_model
from asyncrl.learners.optimize import Optimizer, Update
from asyncrl.learners.parallel import ALONE, Alone
from asyncrl.learners.shares import deal, share_groups, share_of, share_parts, split
from asyncrl.learners.step import StepResult, train_step
from asyncrl.learners.trainer import Trainer
from asyncrl.schema import to_batch

TICKETS = st.lists(st.integers(0, 10_000), min_size=1, max_size=40, unique=True)
RECIPE = Recipe(objective=Objective(preset="grpo"))
OPTIONS: dict[str, Any] = {"objective": RECIPE.objective, "temperature": 1.0, "max_tokens": 30}


@given(TICKETS, st.integers(1, 9))
def test_every_group_is_in_one_part_and_parts_differ_by_one_group_at_most(tickets: list[int], updates: int) -> None:
    parts = split(tickets, updates)
    assert len(parts) == min(updates, len(tickets))
    assert sorted(group for part in parts for group in part) == list(range(len(tickets)))
    assert all(part == sorted(part) for part in parts)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@given(TICKETS, st.integers(1, 9), st.randoms(use_true_random=False))
def test_parts_are_of_tickets_oldest_first_and_do_not_depend_on_the_order_of_arrival(
    tickets: list[int], updates: int, random: Any
) -> None:
    parts = [sorted(tickets[n] for n in part) for part in split(tickets, updates)]
    assert [ticket for part in parts for ticket in part] == sorted(tickets)
    other = random.sample(tickets, len(tickets))
    assert [sorted(other[n] for n in part) for part in split(other, updates)] == parts


@given(TICKETS, st.integers(1, 5), st.integers(1, 4))
def test_every_rank_makes_every_update_by_the_groups_it_was_dealt(tickets: list[int], updates: int, ranks: int) -> None:
    shares = deal(tickets, [1 + ticket % 7 for ticket in tickets], updates=updates, ranks=ranks)
    assert [sorted(group for share in update for group in share) for update in shares] == split(tickets, updates)
    for rank in range(ranks):
        own = share_groups(shares, rank)
        parts = share_parts(shares, rank)
        assert [[own[n] for n in part] for part in parts] == [update[rank] for update in shares]


Rewards = Sequence[Sequence[float]]


@pytest.fixture
def model(model_path: Path):
    return load_model(model_path, "float32", "auto")


@pytest.fixture(scope="module")
def groups_of(make_row: Any, make_group: Any) -> Callable[[Rewards], list[pa.RecordBatch]]:
    """Groups of these rewards; their lengths differ, the first ones being the longest."""

    def build(rewards: Rewards) -> list[pa.RecordBatch]:
        generator = np.random.default_rng(0)
        groups = []
        for ticket, members in enumerate(rewards):
            rows = []
            for member, reward in enumerate(members):
                n = int(generator.integers(1, 3 + 9 // (ticket + 1)))
                completion, logprobs = generator.integers(0, 24, n).tolist(), generator.normal(-3, 0.3, n).tolist()
                rows.append(make_row([1, 2, 3], completion, logprobs, reward=reward, member=member))
            groups.append(to_batch(make_group(rows, ticket=ticket)))
        return groups

    return build


MIXED: Rewards = [[0, 1, 2], [1, math.nan, 0], [1, 1, 1], [2, 0, 0], [0, 0.5, 1]]
"""Of five groups one has an unscored member, and one teaches nothing."""


class Watched(Optimizer):
    """Notes the gradient of each update, and applies none: all see the same weights. denominator: whose the mean is."""

    def __init__(self, model: Any, of: str = "step") -> None:
        super().__init__(model, Learner())
        self.of = of
        self.gradients: list[torch.Tensor] = []

    def update(self, tokens: int, *, denominator: float, ess: float | None = None) -> Update:
        divisor = denominator if self.of == "step" else tokens
        self.gradients.append(torch.cat([p.grad.flatten() / divisor for p in self._parameters if p.grad is not None]))
        self._adam.zero_grad(set_to_none=True)
        return Update(grad_norm=0.0, learning_rate=0.0)


def mean_gradient(
    model: Any, groups: list[pa.RecordBatch], updates: int, *, max_tokens: int = 30, of: str = "step"
) -> torch.Tensor:
    """Over the updates of one step, all from the same weights."""
    batch, worth = share_of(groups, version=1, recipe=RECIPE)
    optimizer = Watched(model, of)
    parts = split(range(len(groups)), updates)
    train_step(model, optimizer, batch, worth, **{**OPTIONS, "max_tokens": max_tokens}, parts=parts)
    assert len(optimizer.gradients) == updates
    return torch.stack(optimizer.gradients).mean(0)


@pytest.mark.parametrize("updates", [2, 3, 5])
def test_at_equal_weights_the_mean_of_the_updates_gradients_is_that_of_one_update(
    model: Any, groups_of: Any, updates: int
) -> None:
    groups = groups_of(MIXED)
    whole = mean_gradient(model, groups, 1, max_tokens=10**6)
    assert whole.abs().max() > 1e-2
    for max_tokens in (1, 17, 10**6):
        found = mean_gradient(model, groups, updates, max_tokens=max_tokens)
        torch.testing.assert_close(found, whole, atol=1e-6, rtol=1e-5)


def test_these_groups_can_tell_a_mean_of_each_update_of_its_own(model: Any, groups_of: Any) -> None:
    """Negative control: divided by the tokens of their own parts, the updates weigh short answers more."""
    groups = groups_of(MIXED)
    wrong = mean_gradient(model, groups, 2, of="update")
    assert (wrong - mean_gradient(model, groups, 1)).abs().max() > 1e-3


class Two(Alone):
    """One of two ranks, whose sums have the other's numbers in them."""

    size = 2

    def __init__(self, rank: int, other: Sequence[Sequence[float]]) -> None:
        self.rank, self.other = rank, iter(other)

    def total(self, values: Sequence[float]) -> list[float]:
        return [a + b for a, b in zip(values, next(self.other), strict=True)]


def test_the_denominator_is_of_the_step_over_both_ranks_and_all_updates(model: Any, groups_of: Any) -> None:
    """Two ranks take turns in this process: their gradients add up to those of one, update by update."""
    groups = groups_of(MIXED)
    batch, _ = share_of(groups, version=1, recipe=RECIPE)
    loads = np.bincount(batch.groups, weights=batch.lengths).tolist()
    shares = deal(range(len(groups)), loads, updates=3, ranks=2)
    assert [] in [share for update in shares for share in update], "one rank has nothing to do in one update"
    own = [share_of([groups[n] for n in share_groups(shares, rank)], version=1, recipe=RECIPE) for rank in (0, 1)]
    sums: list[list[list[float]]] = []
    for rank in (0, 1):
        probe = Noted(rank)
        train_step(model, Watched(model), *own[rank], **OPTIONS, parts=share_parts(shares, rank), ranks=probe)
        sums.append(probe.sums)
    found = torch.zeros(())
    for rank in (0, 1):
        optimizer, both = Watched(model), Two(rank, sums[1 - rank])
        train_step(model, optimizer, *own[rank], **OPTIONS, parts=share_parts(shares, rank), ranks=both)
        found = found + torch.stack(optimizer.gradients)
    alone = Watched(model)
    batch, worth = share_of(groups, version=1, recipe=RECIPE)
    train_step(model, alone, batch, worth, **OPTIONS, parts=split(range(len(groups)), 3))
    torch.testing.assert_close(found, torch.stack(alone.gradients), atol=1e-6, rtol=1e-5)


class Noted(Alone):
    """What one of two ranks gives to each sum."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.sums: list[list[float]] = []

    def total(self, values: Sequence[float]) -> list[float]:
        self.sums.append(list(values))
        return list(values)


def a_step(
    model: Any, optimizer: Optimizer, own: tuple[Batch, NDArray[np.float64]], parts: Sequence[Sequence[int]]
) -> StepResult:
    return train_step(model, optimizer, *own, **OPTIONS, parts=parts, ranks=ALONE)


def test_one_part_of_all_groups_is_the_step_of_one_update_bit_for_bit(model_path: Path, groups_of: Any) -> None:
    own = share_of(groups_of(MIXED), version=1, recipe=RECIPE)
    weights = []
    for parts in (None, [[0, 1, 2, 3, 4]]):
        model = load_model(model_path, "float32", "auto")
        optimizer = Optimizer(model, Learner(learning_rate=1e-2))
        for _ in range(3):
            train_step(model, optimizer, *own, **OPTIONS, parts=parts)
        weights.append([tensor.clone() for _, tensor in served_weights(model)])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_a_later_updates_ratio_is_that_of_its_own_weights_to_those_that_sampled(model: Any, groups_of: Any) -> None:
    """So that the clip does its work: what the updates before have done to a token is in its ratio."""
    groups = groups_of(MIXED)
    own = share_of(groups, version=1, recipe=RECIPE)
    start = a_step(model, Watched(model), own, [range(5)]).seen
    optimizer = Optimizer(model, Learner(learning_rate=0.1, warmup_steps=0))
    seen = a_step(model, optimizer, own, [[0, 1], [2, 3, 4]]).seen
    first = np.isin(np.repeat(own[0].groups, own[0].lengths), [0, 1])
    np.testing.assert_array_equal(seen.included, start.included)
    np.testing.assert_allclose(seen.logprobs[first], start.logprobs[first], atol=1e-5)
    later = ~first & seen.included
    assert np.abs(seen.logprobs - start.logprobs)[later].max() > 0.1
    expected = np.exp(seen.logprobs - own[0].behaviour.numpy())[later]
    np.testing.assert_allclose(seen.ratio[later], expected, rtol=1e-4)


def test_an_update_that_is_not_finite_is_left_out_and_the_others_are_made(model: Any, groups_of: Any) -> None:
    batch, worth = share_of(groups_of(MIXED), version=1, recipe=RECIPE)
    optimizer = Optimizer(model, Learner(learning_rate=1e-2))
    worth = np.where(batch.groups == 0, np.inf, worth)
    updates = a_step(model, optimizer, (batch, worth), [[0, 1], [2, 3], [4]]).updates
    assert [bool(update.skipped) for update in updates.each] == [True, False, False]
    assert updates.skipped == ""
    assert math.isfinite(updates.grad_norm)
    assert (optimizer.updates, optimizer.steps, optimizer.skipped_in_a_row) == (2, 1, 0)

    before = [p.detach().clone() for p in model.parameters()]
    worth = np.full_like(worth, np.inf)
    updates = a_step(model, optimizer, (batch, worth), [[0, 1], [2, 3], [4]]).updates
    assert updates.skipped.startswith("the gradient's norm is")
    assert (optimizer.updates, optimizer.steps, optimizer.skipped_in_a_row) == (2, 1, 1)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_a_part_in_which_nothing_was_scored_makes_no_update(model: Any, groups_of: Any) -> None:
    own = share_of(groups_of([[math.nan, math.nan], [0, 1]]), version=1, recipe=RECIPE)
    optimizer = Optimizer(model, Learner())
    updates = a_step(model, optimizer, own, [[0], [1]]).updates
    assert [update.skipped for update in updates.each] == [
        "no token to train: no member of any group was scored, or masks took all",
        "",
    ]
    assert (optimizer.updates, optimizer.steps) == (1, 1)


def test_tokens_that_are_not_finite_leave_the_denominator_once_they_are_seen(
    model: Any, groups_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model gives NaN for the first sampled token of each answer to the second part."""
    batch, worth = share_of(groups_of(MIXED), version=1, recipe=RECIPE)
    broken: list[int] = []
    whole = step.token_predictions

    def with_nan(*arguments: Any, **named: Any) -> Any:
        found = whole(*arguments, **named)
        if broken and torch.is_grad_enabled():
            logprobs = found.logprobs
            found = found._replace(logprobs=torch.where(torch.arange(len(logprobs)) == 3, torch.nan, logprobs))
        return found

    monkeypatch.setattr(step, "token_predictions", with_nan)
    denominators = []

    class Noting(Watched):
        def update(self, tokens: int, *, denominator: float, ess: float | None = None) -> Update:
            denominators.append((tokens, denominator))
            broken.append(1)
            return super().update(tokens, denominator=denominator)

    seen = train_step(model, Noting(model), batch, worth, **{**OPTIONS, "max_tokens": 1}, parts=[[0, 1], [3, 4]]).seen
    assert seen.nonfinite > 0
    of_group_2 = int(np.repeat(batch.groups == 2, batch.lengths)[batch.trained.numpy()].sum())
    assert denominators[0][1] == batch.tokens / 2
    assert denominators[1][1] == (batch.tokens - seen.nonfinite) / 2
    assert sum(tokens for tokens, _ in denominators) == batch.tokens - seen.nonfinite - of_group_2


def test_a_batch_of_fewer_groups_than_updates_makes_fewer(model_path: Path, groups_of: Any) -> None:
    recipe = Recipe(objective=Objective(preset="grpo"), learner=Learner(updates_per_step=4))
    trainer = Trainer.load(recipe, model_path, None)
    prepared = trainer.prepare(groups_of(MIXED[:3]), version=1)
    seen, updates = trainer.train(prepared)
    assert prepared.shares == [[[0]], [[1]], [[2]]]
    assert (len(updates.applied), trainer.optimizer.steps) == (3, 1)
    assert seen.tokens == prepared.batch.tokens
    of_first = np.repeat(prepared.batch.groups == 0, prepared.batch.lengths)
    np.testing.assert_array_equal(prepared.first, np.flatnonzero(of_first))
