"""What a batch may hold that nobody should have put into it: every preset takes a finite step of it, and says what it
left out. The table is in docs/learner.md."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args

import numpy as np
import pytest
import torch

from asyncrl.config.objective import Aggregation, Objective, Preset
from asyncrl.config.recipe import Recipe
from asyncrl.learners import step
from asyncrl.learners.diagnostics import step_metrics
from asyncrl.learners.model import load_model
from asyncrl.learners.shares import share_of
from asyncrl.learners.step import train_step
from asyncrl.learners.trainer import Trainer
from asyncrl.schema import to_batch

PRESETS = get_args(Preset)


@pytest.fixture
def stepped(model_path: Any, make_row: Any, make_group: Any) -> Any:
    """What is told of a step by two groups of three answers, and the largest change of a weight. The first group's
    first answer has the given log-probs, and another reward than the others."""

    def step(preset: Preset, first: list[float], *, first_reward: float = 1.0) -> tuple[dict[str, Any], float]:
        trainer = Trainer.load(Recipe(objective=Objective(preset=preset)), model_path, None)
        before = [p.detach().clone() for p in trainer.model.parameters()]
        generator = np.random.default_rng(2)
        groups = []
        for ticket in range(2):
            rows = []
            for member in range(3):
                here = first if ticket == member == 0 else generator.normal(-3, 0.3, 4).tolist()
                completion = generator.integers(0, 24, len(here)).tolist()
                reward = first_reward if member == 0 else 0.0
                rows.append(make_row([1, 2, 3], completion, here, reward=reward, member=member))
            groups.append(to_batch(make_group(rows, ticket=ticket)))
        prepared = trainer.prepare(groups, version=1)
        seen, updates = trainer.train(prepared)
        told = step_metrics(prepared.packed, prepared.batch, prepared.worth, seen, first=prepared.first, update="keep")
        assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
        after = list(trainer.model.parameters())
        moved = max(float((p - old).detach().abs().max()) for p, old in zip(after, before, strict=True))
        return {**told, "skipped": updates.skipped, "grad_norm": updates.grad_norm}, moved

    return step


@pytest.mark.parametrize("preset", PRESETS)
def test_behaviour_logprobs_that_are_no_numbers_are_left_out_and_counted(stepped: Any, preset: Preset) -> None:
    told, moved = stepped(preset, [math.nan, -3.0, -math.inf, math.inf])
    assert (told["nonfinite"], told["skipped"]) == (3, "")
    assert told["tokens"] + sum(told["mask/tokens"].values()) == 6 * 4 - 3
    assert math.isfinite(told["loss"])
    assert math.isfinite(told["grad_norm"])
    assert moved > 0


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("behaviour", [-53.0, 47.0], ids=["ratio about e^50", "ratio about e^-50"])
def test_a_ratio_beyond_all_measure_is_a_finite_step(stepped: Any, preset: Preset, behaviour: float) -> None:
    told, moved = stepped(preset, [behaviour] * 4)
    assert (told["nonfinite"], told["skipped"]) == (0, "")
    assert math.isfinite(told["loss"])
    assert math.isfinite(told["grad_norm"])
    assert moved > 0


@pytest.mark.parametrize("preset", PRESETS)
def test_an_empty_answer_is_in_the_baseline_and_has_no_loss(stepped: Any, preset: Preset) -> None:
    told, moved = stepped(preset, [])
    assert told["tokens"] + sum(told["mask/tokens"].values()) == 5 * 4
    assert (told["nonfinite"], told["skipped"], told["unscored"]) == (0, "", 0)
    assert told["zero_variance"] == 0, "the others of its group are worse than it"
    assert math.isfinite(told["loss"])
    assert moved > 0


class Watched:
    """An optimizer that changes nothing, and notes the gradient that it would have applied."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def update(self, tokens: int, *, denominator: float, ess: float | None = None) -> Any:
        self.gradient = gradient_of(self.model) / denominator

    def ended(self, updates: Any) -> None:
        self.model.zero_grad()


def gradient_of(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_what_the_learner_cannot_predict_is_left_out_as_if_it_had_not_been_there(
    model_path: Any, make_row: Any, make_group: Any, monkeypatch: pytest.MonkeyPatch, aggregation: Aggregation
) -> None:
    """The model gives token 23 no chance, in one answer of each group. Control: in one sum over passes, with a weight
    by prompt, the others of the prompt would weigh too little."""
    objective = Objective(preset="grpo", aggregation=aggregation)
    generator, groups = np.random.default_rng(2), []
    for ticket in range(3):
        rows = []
        for member in range(3):
            answer = generator.integers(0, 23, 5).tolist()
            answer[2:4] = [23, 23] if member == 0 else answer[2:4]
            rows.append(make_row([1, 2, 3], answer, [-3.0] * 5, reward=float(member == ticket), member=member))
        groups.append(to_batch(make_group(rows, ticket=ticket)))
    model = load_model(model_path, "float32", "auto")
    batch, worth = share_of(groups, version=1, recipe=Recipe(objective=objective))
    options: Any = {"objective": objective, "temperature": 1.0, "longest": 8}

    def stepped_by(batch: Any, max_tokens: int) -> tuple[torch.Tensor, int]:
        optimizer: Any = Watched(model)
        seen = train_step(model, optimizer, batch, worth, max_tokens=max_tokens, **options).seen
        return optimizer.gradient, seen.nonfinite

    never = dataclasses.replace(batch, trained=batch.trained & (batch.token_ids != 23))
    expected, none = stepped_by(never, 10**6)
    predictions = step.token_predictions

    def impossible(model: Any, token_ids: Any, *rest: Any, **named: Any) -> Any:
        found = predictions(model, token_ids, *rest, **named)
        return found._replace(logprobs=torch.where(token_ids == 23, -torch.inf, found.logprobs))

    monkeypatch.setattr(step, "token_predictions", impossible)
    for max_tokens in (10**6, 20, 1):
        found, lost = stepped_by(batch, max_tokens)
        assert (none, lost) == (0, 6)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    seen = step.accumulate(model, batch, worth, max_tokens=20, **options)
    once = gradient_of(model) / seen.units
    assert torch.allclose(once, expected, atol=1e-5, rtol=1e-4) == (aggregation != "prompt")


@pytest.mark.parametrize("preset", PRESETS)
def test_the_largest_reward_that_a_record_holds_is_trained_or_its_update_skipped_by_name(
    stepped: Any, preset: Preset
) -> None:
    """Where advantages are divided by a spread they are of common size; elsewhere the gradient is not finite."""
    told, moved = stepped(preset, [-3.0] * 4, first_reward=3e38)
    assert (moved == 0) == told["skipped"].startswith("the gradient's norm is")
    assert moved > 0 or preset in ("dr-grpo", "rloo")
