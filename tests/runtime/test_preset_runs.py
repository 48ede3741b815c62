"""Every preset learns the tiny task in a real run at age 1, as the command that docs/objectives.md gives."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from asyncrl.benchmarks.runs import train
from asyncrl.config.loading import load_recipe
from asyncrl.config.objective import Preset

OWN_RECIPES = {"gspo": "tiny-gspo"}
"""Presets whose clip or rate is not for answers of a few tokens."""

LEARNT = 0.85


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("preset", get_args(Preset))
def test_a_run_by_each_preset_at_age_1_learns(preset: str, tmp_path: Path) -> None:
    """Mean over all answers of the last 20 of 60 steps, from the archive. The warm start is at 0.2."""
    settings = {
        "run.name": f"preset-{preset}",
        "buffer.max_trajectory_age": 1,
        "objective.preset": preset,
        "eval.at_start": False,
        "eval.at_end": False,
    }
    found = train(tmp_path / preset, settings, recipe=OWN_RECIPES.get(preset, "tiny-reverse"))
    assert (found.steps, found.age_max) == (60, 1)
    assert found.reward_start < 0.5
    assert found.reward_end >= LEARNT


def test_the_recipe_of_a_preset_changes_its_clip_and_nothing_else() -> None:
    own = load_recipe("tiny-gspo", environ={})
    plain = load_recipe("tiny-reverse", overrides=["objective.preset=gspo"], environ={}).recipe
    differing = [key for key in own.parent_diff if not key.startswith("objective.")]
    assert differing == ["run.name"]
    parts = [key for key in plain.objective.__struct_fields__ if not key.startswith("epsilon")]
    assert [getattr(own.recipe.objective, key) for key in parts] == [getattr(plain.objective, key) for key in parts]
