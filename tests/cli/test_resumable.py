"""What may change when a run goes on, and what is refused by name, with both values."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from asyncrl.cli.options import recipe_of
from asyncrl.config.convert import every_key
from asyncrl.config.loading import load_recipe
from asyncrl.config.merge import is_under
from asyncrl.config.recipe import Recipe
from asyncrl.config.resolved import resolved_yaml
from asyncrl.config.resumable import MAY_CHANGE
from asyncrl.learners.arithmetic import settings
from asyncrl.learners.checkpoint import CheckpointError
from asyncrl.learners.resuming import check_settings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(resolved_yaml(load_recipe(None).recipe))
    return tmp_path


def test_every_key_that_may_change_is_one() -> None:
    keys = set(every_key())
    assert [name for name in MAY_CHANGE if not any(is_under(key, [name]) for key in keys)] == []


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("run.max_steps=90", lambda recipe: recipe.run.max_steps == 90),
        ("learner.checkpoint.keep_every=40", lambda recipe: recipe.learner.checkpoint.keep_every == 40),
        ("learner.checkpoint.async_save=false", lambda recipe: not recipe.learner.checkpoint.async_save),
        ("eval.every_steps=20", lambda recipe: recipe.eval.every_steps == 20),
        ("learner.learning_rate=0.001", lambda recipe: True),  # as it is
    ],
)
def test_what_may_change_changes(folder: Path, given: str, found: object) -> None:
    loaded = recipe_of(None, folder, overrides=[given])
    assert found(loaded.recipe)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "learner.learning_rate=0.5",
            "learner.learning_rate: a resumed run .* its own, 0.001, and does not take 0.5",
        ),
        ("buffer.max_trajectory_age=2", "buffer.max_trajectory_age: .* its own, 1, and does not take 2"),
        ("task.digits=[3, 4]", r"task.digits: .* its own, \[3, 6\], and does not take \[3, 4\]"),
        ("run.nme=x", 'run.nme: .* its own, null, and does not take "x"'),
    ],
)
def test_what_may_not_change_is_refused_by_name_with_both_values(folder: Path, given: str, said: str) -> None:
    with pytest.raises(click.UsageError, match=f"^--set {said}.*only run.max_steps, .* may change$"):
        recipe_of(None, folder, overrides=[given])


def test_a_recipe_that_was_changed_in_the_runs_folder_is_refused_by_the_learner() -> None:
    def start(*overrides: str) -> Recipe:
        return load_recipe(None, overrides=overrides).recipe

    records = [
        {"event": "start", "lineage": 1, "settings": settings(start("learner.learning_rate=0.5"))},
        {"event": "start", "lineage": 2, "settings": settings(start())},
        {"step": 1},
    ]
    path = Path("run/recipe.yaml")
    check_settings(records, start("learner.updates_per_step=2", "run.max_steps=7", "learner.ranks=2"), path)
    with pytest.raises(CheckpointError, match=r"^run/recipe.yaml has learner.learning_rate: 0.5, but .* with 0.001, "):
        check_settings(records, start("learner.learning_rate=0.5"), path)
    known = {key: value for key, value in records[1]["settings"].items() if key != "learner.learning_rate"}  # type: ignore[attr-defined]
    check_settings([{"event": "start", "settings": known}], start("learner.learning_rate=0.5"), path)  # as of before it
    check_settings([], start(), path)
