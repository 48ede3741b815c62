"""Steps of a real model by every preset: one gradient however the batch is split, and bad input that is counted."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from asyncrl.config.objective import DppoTv, Objective, Preset, TokenAge, TruncatedMask
from asyncrl.config.recipe import DataSource, Learner, Recipe, SingleTurnTask
from asyncrl.config.rewards import Exact, Length
from asyncrl.learners.advantages import compared, scaled
from asyncrl.learners.diagnostics import step_metrics
from asyncrl.learners.model import load_model
from asyncrl.learners.shares import share_of
from asyncrl.learners.step import accumulate, planned_units, train_step
from asyncrl.learners.trainer import Trainer
from asyncrl.schema import pack, to_batch

OBJECTIVES = {
    **{preset: Objective(preset=preset) for preset in get_args(Preset)},
    "masked": Objective(preset="grpo", mask=[DppoTv(threshold=0.05), TruncatedMask()]),
    "prompt": Objective(preset="grpo", aggregation="prompt", mask=[TruncatedMask()]),
    "sequence": Objective(preset="async", aggregation="sequence"),
    "beta and entropy": Objective(preset="grpo", beta=0.3, entropy=0.2),
}


@pytest.fixture(scope="module")
def groups_of(make_row: Any, make_group: Any) -> Any:
    """Groups with these rewards; lengths differ, log-probs are near the model's, one answer in four was cut."""

    def build(rewards: list[list[float]]) -> list[Any]:
        generator = np.random.default_rng(0)
        groups = []
        for ticket, members in enumerate(rewards):
            rows = []
            for member, reward in enumerate(members):
                n = int(generator.integers(1, 9))
                completion, logprobs = generator.integers(0, 24, n).tolist(), generator.normal(-3, 0.4, n).tolist()
                rows.append(
                    make_row(
                        [1, 2, 3],
                        completion,
                        logprobs,
                        reward=reward,
                        member=member,
                        finish="length" if (ticket + member) % 4 == 3 else "stop",
                    )
                )
            groups.append(to_batch(make_group(rows, ticket=ticket)))
        return groups

    return build


REWARDS = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.5], [0.0, math.nan, 1.0], [2.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 1.0]]


def reference_of(batch: Any) -> torch.Tensor:
    """What another policy might say of each token, wherever it is in the batch."""
    return batch.behaviour - 0.2 + 0.1 * (batch.token_ids % 5)


def gradient(
    model: Any, objective: Objective, groups: list[Any], *, max_tokens: int = 10**6, worth_as: list[Any] | None = None
) -> Any:
    """The gradient's sum and what was seen, of groups as one rank packs them. worth_as: whose advantages they get."""
    recipe = Recipe(objective=objective)
    batch, worth = share_of(groups, version=1, recipe=recipe)
    if worth_as is not None:
        _, worth = share_of(worth_as, version=1, recipe=recipe)
    model.zero_grad()
    seen = accumulate(
        model,
        batch,
        worth,
        objective=objective,
        temperature=1.0,
        max_tokens=max_tokens,
        longest=8,
        reference=reference_of(batch),
    )
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), seen


@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_order_and_ranks_do_not_change_the_gradient(model_path: Path, groups_of: Any, name: str) -> None:
    """Controls: with a denominator for each rank they do, and so does order with advantages in that of arrival."""
    objective, model = OBJECTIVES[name], load_model(model_path, "float32", "auto")
    groups = groups_of(REWARDS)
    whole, seen = gradient(model, objective, groups)
    assert whole.abs().max() > 1e-4
    close = {"atol": 2e-5, "rtol": 1e-4}
    for max_tokens in (1, 17, 40):
        torch.testing.assert_close(gradient(model, objective, groups, max_tokens=max_tokens)[0], whole, **close)
    torch.testing.assert_close(gradient(model, objective, groups[::-1])[0], whole, **close)
    assert not torch.allclose(gradient(model, objective, groups[::-1], worth_as=groups)[0], whole, atol=1e-3)
    (first, a), (second, b) = (gradient(model, objective, part) for part in (groups[:2], groups[2:]))
    torch.testing.assert_close(first + second, whole, **close)
    assert a.units + b.units == seen.units
    assert a.tokens + b.tokens == seen.tokens
    local = (first / a.units + second / b.units) / 2
    assert not torch.allclose(local, whole / seen.units, atol=1e-4 * float(whole.abs().max()) / seen.units)


class Watched:
    """An optimizer that changes nothing, and notes what it would have divided."""

    def __init__(self, model: Any) -> None:
        self.model, self.gradients, self.divided = model, [], []

    def update(self, tokens: int, *, denominator: float, ess: float | None = None) -> Any:
        self.divided.append((tokens, denominator))
        self.gradients.append(
            torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None]) / denominator
        )
        self.model.zero_grad()
        return None

    def ended(self, updates: Any) -> None:
        pass


@pytest.mark.parametrize("name", OBJECTIVES)
def test_updates_together_have_the_gradient_of_one(model_path: Path, groups_of: Any, name: str) -> None:
    """At equal weights, but for answers that a mask takes: they are seen when their own update is made."""

    objective, model = OBJECTIVES[name], load_model(model_path, "float32", "auto")
    known = replace(objective, mask=[mask for mask in objective.mask or [] if isinstance(mask, TruncatedMask)])
    batch, worth = share_of(groups_of(REWARDS), version=1, recipe=Recipe(objective=known))
    found = []
    for parts in ([range(6)], [[0, 3], [1, 2, 4, 5]], [[n] for n in range(6)]):
        optimizer: Any = Watched(model)
        train_step(
            model,
            optimizer,
            batch,
            worth,
            objective=known,
            temperature=1.0,
            max_tokens=30,
            longest=8,
            reference=reference_of(batch),
            parts=parts,
        )
        found.append(torch.stack(optimizer.gradients).mean(0))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-6, rtol=1e-3)


def test_what_the_weights_of_the_moment_mask_leaves_the_denominator_from_its_own_update_on(
    model_path: Path, groups_of: Any
) -> None:
    objective = Objective(preset="grpo", mask=[DppoTv(threshold=0.02)])
    model = load_model(model_path, "float32", "auto")
    batch, worth = share_of(groups_of(REWARDS), version=1, recipe=Recipe(objective=objective))
    optimizer: Any = Watched(model)
    parts = [[0, 1, 2], [3, 4, 5]]
    seen = train_step(
        model, optimizer, batch, worth, objective=objective, temperature=1.0, max_tokens=30, parts=parts
    ).seen
    taken = np.repeat(batch.groups < 3, batch.lengths)[seen.masked > 0]
    assert 0 < taken.sum() < len(taken)
    assert [divided for _, divided in optimizer.divided] == [
        (batch.tokens - taken.sum()) / 2,
        (batch.tokens - len(taken)) / 2,
    ]
    assert sum(tokens for tokens, _ in optimizer.divided) == batch.tokens - len(taken) == seen.tokens


def test_what_masks_take_is_counted_by_name_and_leaves_numerator_and_denominator(
    model_path: Path, groups_of: Any
) -> None:
    recipe = Recipe(
        objective=Objective(preset="grpo", mask=[DppoTv(threshold=0.02), TruncatedMask()], aggregation="token")
    )
    trainer = Trainer.load(recipe, model_path, None)
    step = trainer.prepare(groups_of(REWARDS), version=1)
    seen, updates = trainer.train(step)
    found = step_metrics(step.packed, step.batch, step.worth, seen, first=step.first, update="keep")
    assert set(found["mask/tokens"]) == {"dppo-tv", "truncated"}
    assert seen.tokens + sum(found["mask/tokens"].values()) == step.batch.tokens
    assert (seen.nonfinite, updates.skipped) == (0, "")
    assert seen.units == seen.tokens
    cut = np.repeat(step.batch.truncated, step.batch.lengths) & step.batch.trained.numpy()
    assert found["mask/tokens"]["truncated"] >= cut.sum() - found["mask/tokens"]["dppo-tv"]
    assert not (seen.included & cut).any()
    plain = planned_units(step.batch, Objective(preset="grpo"), range(6))
    assert planned_units(step.batch, recipe.objective, range(6)) == plain - cut.sum()


def test_a_step_in_which_masks_take_everything_is_skipped_and_the_weights_stay(
    model_path: Path, groups_of: Any
) -> None:
    recipe = Recipe(objective=Objective(preset="grpo", mask=[TokenAge(max_age=0)]), learner=Learner(updates_per_step=2))
    trainer = Trainer.load(recipe, model_path, None)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    seen, updates = trainer.train(trainer.prepare(groups_of(REWARDS), version=1))
    assert "masks took all" in updates.skipped
    assert (seen.tokens, seen.loss) == (0, 0.0)
    assert all(torch.equal(p, old) for p, old in zip(trainer.model.parameters(), before, strict=True))


@pytest.mark.parametrize("preset", get_args(Preset))
@pytest.mark.parametrize(
    "rewards",
    [[[math.nan, math.nan]], [[1.0]], [[0.3] * 3], [[1.0, 1.0 + 1e-9, 1.0]], [[math.nan, 1.0], [1.0, 0.0]]],
    ids=["unscored", "one member", "all equal", "equal in float32", "one left"],
)
def test_groups_that_teach_nothing_leave_a_finite_loss_and_small_gradients(
    model_path: Path, groups_of: Any, preset: Any, rewards: list[list[float]]
) -> None:
    recipe = Recipe(objective=Objective(preset=preset))
    trainer = Trainer.load(recipe, model_path, None)
    seen, updates = trainer.train(trainer.prepare(groups_of(rewards), version=1))
    assert math.isfinite(seen.loss)
    assert all(math.isfinite(update.grad_norm) for update in updates.each)
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    if len(rewards) == 1 and preset != "async":  # which has an anchor
        assert updates.grad_norm < 0.1


# --- advantages -------------------------------------------------------------------------------------------------------


def total(values: Any) -> list[float]:
    return list(values)


def worth_of(groups: list[Any], kind: Any, task: Any = None) -> np.ndarray[Any, Any]:
    recipe = Recipe(objective=Objective(preset="grpo", advantage=kind))
    packed = pack(groups)
    recipe = recipe if task is None else Recipe(objective=recipe.objective, task=task)
    return scaled(packed.rewards, packed.answers, compared(packed, recipe).values, kind, total=total)


def test_a_spread_over_the_step_divides_every_group_alike(groups_of: Any) -> None:
    rewards = [[1.0, 0.0], [3.0, 1.0], [math.nan, 2.0]]
    spread = np.std([1.0, 0.0, 3.0, 1.0, 2.0], ddof=1) + 1e-4
    found = worth_of(groups_of(rewards), "group-mean-batch-std")
    np.testing.assert_allclose(found, np.array([0.5, -0.5, 1.0, -1.0, 0.0, 0.0]) / spread)
    np.testing.assert_allclose(worth_of(groups_of(rewards), "leave-one-out-batch-std"), 2 * found)
    assert np.abs(worth_of(groups_of([[1.0, 1.0 + 1e-9], [1.0, 1.0]]), "group-mean-batch-std")).max() < 1e-4


def test_a_spread_over_the_step_is_that_of_all_ranks(groups_of: Any) -> None:
    """Each gives its sums and gets those of both. Control: alone, a rank has another."""
    rewards = [[1.0, 0.0], [3.0, 1.0], [5.0, 2.0]]
    whole = worth_of(groups_of(rewards), "group-mean-batch-std")
    recipe = Recipe(objective=Objective(preset="grpo", advantage="group-mean-batch-std"))
    packed = [pack(groups_of(rewards)[:1]), pack(groups_of(rewards)[1:])]
    values, kind = [compared(part, recipe).values for part in packed], recipe.objective.advantage
    everything = np.array([1.0, 0.0, 3.0, 1.0, 5.0, 2.0])
    given: list[list[float]] = [[6.0, 12.0], [float(((everything - 2) ** 2).sum())]]
    for part, own, expected in zip(packed, values, (whole[:2], whole[2:]), strict=True):
        answers = iter(given)
        found = scaled(part.rewards, part.answers, own, kind, total=lambda _, answers=answers: next(answers))
        np.testing.assert_allclose(found, expected)
    assert not np.allclose(scaled(packed[0].rewards, packed[0].answers, values[0], kind, total=total), whole[:2])


def test_raw_advantages_are_the_rewards_and_zero_where_there_is_none(groups_of: Any) -> None:
    assert worth_of(groups_of([[0.25], [math.nan, 1.0]]), "raw").tolist() == [0.25, 0.0, 1.0]


def parted(make_row: Any, make_group: Any, parts: list[dict[str, float]], weights: dict[str, float]) -> list[Any]:
    rows = []
    for member, own in enumerate(parts):
        row = make_row([1], [2, 3], [-1.0, -1.0], reward=sum(weights[k] * v for k, v in own.items()), member=member)
        rows.append(dataclasses.replace(row, reward_parts=own))
    return [to_batch(make_group(rows))]


def test_gdpo_normalises_each_part_before_they_are_added(make_row: Any, make_group: Any) -> None:
    """Parts whose sum is the same for all say nothing to GRPO; to GDPO a part on a larger scale says no more."""
    one = {"exact": 1.0, "short": 1.0}
    parts = [{"exact": 1.0, "short": 0.0}, {"exact": 0.0, "short": 10.0}, {"exact": 0.0, "short": 0.0}]
    found = worth_of(parted(make_row, make_group, parts, one), "gdpo")
    scale = 1 / (np.std([1, 0, 0], ddof=1) + 1e-4)
    exact = np.array([2, -1, -1]) / 3 * scale
    short = np.array([-10, 20, -10]) / 3 / (np.std([0, 10, 0], ddof=1) + 1e-4)
    np.testing.assert_allclose(found, (exact + short) / (np.std(exact + short, ddof=1) + 1e-4))
    level = [{"exact": 1.0, "short": 0.0}, {"exact": 0.0, "short": 1.0}]
    assert worth_of(parted(make_row, make_group, level, one), "group-mean-std").tolist() == [0.0, 0.0]


def test_gdpo_refuses_parts_that_it_would_weigh_differently_than_the_reward(make_row: Any, make_group: Any) -> None:
    task = SingleTurnTask(data=DataSource(train="x.jsonl"), rewards=[Exact(weight=2.0)])
    groups = parted(make_row, make_group, [{"exact": 1.0}, {"exact": 0.0}], {"exact": 2.0})
    assert worth_of(groups, "gdpo", task)[0] > 0
    with pytest.raises(ValueError, match="the parts exact do not add up to the reward"):
        worth_of(groups, "gdpo")


def test_gdpo_weighs_shaping_as_the_reward_does_and_scale_says_nothing_to_it(make_row: Any, make_group: Any) -> None:
    parts = [{"exact": 1.0, "length": -0.5}, {"exact": 0.0, "length": 0.0}, {"exact": 0.0, "length": -0.25}]
    data, rewards = DataSource(train="x.jsonl"), [Exact(), Length(target_tokens=3, weight=0.4)]
    plain = SingleTurnTask(data=data, rewards=rewards)
    scaled_up = SingleTurnTask(data=data, rewards=rewards, reward_scale=8.0)
    found = worth_of(parted(make_row, make_group, parts, {"exact": 1.0, "length": 0.4}), "gdpo", plain)
    same = worth_of(parted(make_row, make_group, parts, {"exact": 8.0, "length": 3.2}), "gdpo", scaled_up)
    np.testing.assert_allclose(found, same)
    assert found[1] > found[2], "of two wrong answers the one that is nearer to the length asked for"


def test_advantages_do_not_know_in_which_order_groups_arrived(groups_of: Any) -> None:
    groups = groups_of(REWARDS)
    for kind in ("group-mean-std", "leave-one-out-batch-std", "gdpo", "raw"):
        there, back = worth_of(groups, kind), worth_of(groups[::-1], kind)
        by_group = [there[n : n + 3] for n in range(0, 18, 3)]
        np.testing.assert_allclose(np.concatenate(by_group[::-1]), back, atol=1e-12)
