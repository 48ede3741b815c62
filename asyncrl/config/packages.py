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


def check_reasoning_gym(key: str, task: ReasoningGymTask) -> None:
    """Raise RecipeError for datasets that cannot be meant. The package is not asked: it need not be here."""
    names = [dataset.name for dataset in task.datasets]
    if not names:
        raise RecipeError(f"{key}.datasets is []; name at least one, such as [{{name: spell_backward}}]")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RecipeError(f"{key}.datasets has {quoted(twice)} twice; the package tells them apart by name. Keep one")
    for n, dataset in enumerate(task.datasets):
        if given := next((key for key in GIVEN if key in dataset.config), None):
            raise RecipeError(
                f"{key}.datasets[{n}].config has {given}, of which training and held-out questions are made. Leave it "
                f"out, and write {key}.rows and {key}.heldout_rows"
            )


class VerifiersTask(ScoringTask, frozen=True, kw_only=True):
    """An environment of the package verifiers, of the extra `verifiers` (`docs/packages.md`)."""

    type: Literal["verifiers"] = "verifiers"
    environment: str  # id of an installed taskset, or of a module in the working folder
    args: dict[str, Any] = field(default_factory=dict)  # its own configuration, as under `env.taskset` of `vf-eval`
    heldout_args: dict[str, Any] | None = None  # over `args`, for held-out rows; null: one prompt in ten, by a hash
    rows: Positive | None = None  # the first so many of its tasks; null: all, which an infinite one does not have
    env: dict[str, Any] | None = None  # who plays it, as under `env` of `vf-eval`; null: the model answers once
    tool_format: Literal["hermes", "json"] = (
        "hermes"  # with `env`: how the model writes a call (`docs/environments.md`)
    )
    memory_limit: str | int | None = None  # with `env`: address space of an episode's process, as in 2GiB; null: any


def check_verifiers(key: str, task: VerifiersTask) -> None:
    """Raise RecipeError for keys that cannot be meant. The package is not asked: it need not be here."""
    if not task.environment:
        raise RecipeError(f"{key}.environment is empty; write the id of a taskset, such as reverse_text")
    for name, args in (("args", task.args), ("heldout_args", task.heldout_args or {})):
        if "id" in args:
            raise RecipeError(f"{key}.{name}.id is {quoted(args['id'])}; write it as {key}.environment")
    if task.heldout_args is not None and "task" in task.heldout_args:
        raise RecipeError(f"{key}.heldout_args.task: both splits are scored in the same way. Write it under {key}.args")
    if task.env is not None and "taskset" in task.env:
        raise RecipeError(f"{key}.env.taskset: write the taskset's configuration as {key}.args")
