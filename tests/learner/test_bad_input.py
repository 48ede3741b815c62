"""What a batch may hold that nobody should have put into it: every preset takes a finite step of it, and says what it
left out. The table is in docs/learner.md."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch

from asyncrl.config.objective import Objective, Preset
from asyncrl.config.recipe import Recipe
from asyncrl.learners.diagnostics import step_metrics
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
@pytest.mark.parametrize("broken", [math.nan, -math.inf, math.inf], ids=str)
def test_behaviour_logprobs_that_are_no_numbers_are_left_out_and_counted(
    stepped: Any, preset: Preset, broken: float
) -> None:
    told, moved = stepped(preset, [-3.0, broken, -3.0, broken])
    assert (told["nonfinite"], told["skipped"]) == (2, "")
    assert told["tokens"] + sum(told["mask/tokens"].values()) == 6 * 4 - 2
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


@pytest.mark.parametrize("preset", PRESETS)
def test_the_largest_reward_that_a_record_holds_is_trained_or_its_update_skipped_by_name(
    stepped: Any, preset: Preset
) -> None:
    """Where advantages are divided by a spread they are of common size; elsewhere the gradient is not finite."""
    told, moved = stepped(preset, [-3.0] * 4, first_reward=3e38)
    assert (moved == 0) == told["skipped"].startswith("the gradient's norm is")
    assert moved > 0 or preset in ("dr-grpo", "rloo")
