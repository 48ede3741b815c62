"""`task` for published packages of tasks: `reasoning-gym` and `verifiers` (`docs/packages.md`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from asyncrl.config.errors import RecipeError, quoted
from asyncrl.config.rewards import ScoringTask
from asyncrl.config.section import Positive, Section

GIVEN = ("seed", "size")
"""Of a generator's own configuration, what the task decides: the splits are made of it."""


class GymDataset(Section, frozen=True, kw_only=True):
    """One of reasoning-gym's generators."""

    name: str  # as the package has it
    weight: Annotated[float, Meta(gt=0)] = 1.0  # how often it is asked, beside the others
    config: dict[str, Any] = field(default_factory=dict)  # its own keys, all but seed and size


class ReasoningGymTask(ScoringTask, frozen=True, kw_only=True):
    """Questions made and scored by the package reasoning-gym, of the extra `reasoning-gym` (`docs/packages.md`)."""

    type: Literal["reasoning-gym"] = "reasoning-gym"
    datasets: list[GymDataset]  # one or several
    answer: Literal["tagged", "whole"] = "tagged"  # what is between <answer> and </answer>, or all that was written
    system_prompt: str | None = "default"  # text, or the name of one of the package's; null: none
    rows: Positive = 10000  # questions for training, made on demand
    heldout_rows: Positive = 256  # questions that are never trained, all different


def check_reasoning_gym(task: ReasoningGymTask) -> None:
    """Raise RecipeError for datasets that cannot be meant. The package is not asked: it need not be here."""
    names = [dataset.name for dataset in task.datasets]
    if not names:
        raise RecipeError("task.datasets is []; name at least one, such as [{name: spell_backward}]")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RecipeError(f"task.datasets has {quoted(twice)} twice; the package tells them apart by name. Keep one")
    for n, dataset in enumerate(task.datasets):
        if given := next((key for key in GIVEN if key in dataset.config), None):
            raise RecipeError(
                f"task.datasets[{n}].config has {given}, of which training and held-out questions are made. Leave it "
                "out, and write task.rows and task.heldout_rows"
            )
