"""The learner's steps against a reference that shares no code with it, fed from archive and checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.buffers.memory import MemoryBuffer
from asyncrl.config.objective import Objective
from asyncrl.config.recipe import Buffer, Checkpoint, Collector, Eval, Learner, Recipe, Run, SamplingConfig, to_builtins
from asyncrl.learners.limits import limits_of
from asyncrl.learners.service import learn
from asyncrl.telemetry.metrics import read_metrics, surviving_steps

STEPS = 5


@pytest.fixture(scope="module", params=[(1, 1.0), (2, 1e9)], ids=["one update", "two updates"])
def finished(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    model_path: Path,
    draw: Callable[..., Any],
    make_row: Callable[..., Any],
    make_group: Callable[..., Any],
    scripted: Any,
) -> tuple[Path, Recipe]:
    """A run of five steps with tokens of age 0 and 1, lengths that differ, weight decay, and all checkpoints kept; of
    one update a step, or of two, by two groups and by one, whose gradients are not clipped: that hides their size."""
    updates, max_grad_norm = request.param
    recipe = Recipe(
        run=Run(name="right-step", max_steps=STEPS),
        buffer=Buffer(max_trajectory_age=1),
        objective=Objective(preset="grpo"),
        collector=Collector(group_size=4, sampling=SamplingConfig(temperature=1.0)),
        learner=Learner(
            groups_per_step=3,
            updates_per_step=updates,
            max_grad_norm=max_grad_norm,
            learning_rate=1e-2,
            weight_decay=0.1,
            warmup_steps=3,
            max_tokens_per_microbatch=20,
            checkpoint=Checkpoint(every_steps=1, keep_last=STEPS),
        ),
        eval=Eval(at_start=False, at_end=False),
    )
    run_dir = tmp_path_factory.mktemp("right-step")
    buffer = MemoryBuffer(recipe.run.name, limits_of(recipe, max_length=64))
    worker = scripted.ScriptedCollector(
        buffer, model_path, sample=draw, make_row=make_row, make_group=make_group, lag=1
    )

    async def together() -> None:
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(
                learn(recipe, buffer, run_dir=run_dir, model_path=model_path, resume=None, stop=asyncio.Event())
            )
            group.create_task(worker.run())

    asyncio.run(together())
    return run_dir, recipe


def test_a_separate_reference_reproduces_the_next_weights(finished: tuple[Path, Recipe], reference: Any) -> None:
    run_dir, recipe = finished
    for step in range(1, STEPS):
        assert reference.largest_difference(run_dir, step, to_builtins(recipe)) < 1e-5


def test_the_reference_can_tell_a_wrong_step(finished: tuple[Path, Recipe], reference: Any) -> None:
    """Negative control: without the importance ratio, on tokens of age 1; with a mean per sequence, or per update; with
    another clip, another rate, another temperature, all in one update."""
    run_dir, recipe = finished
    ages = {step["step"] - 1: step["age/max"] for step in surviving_steps(read_metrics(run_dir / "metrics.jsonl"))}
    old = next(step for step in range(1, STEPS) if ages[step] == 1)
    right = to_builtins(recipe)
    assert reference.largest_difference(run_dir, old, right, correct=False) > 1e-4
    assert reference.largest_difference(run_dir, old, right, one_denominator=False) > 1e-4
    updates = recipe.learner.updates_per_step
    assert updates == 1 or reference.largest_difference(run_dir, old, right, of_the_step=False) > 1e-4
    for section, values in (
        ("objective", {"epsilon": 0.05, "epsilon_high": 0.05}),
        ("learner", {"learning_rate": 9e-3}),
        ("learner", {"weight_decay": 0.0}),
        ("learner", {"updates_per_step": 3 - updates}),
        ("collector", {"sampling": {"temperature": 0.9}}),
    ):
        wrong = msgspec.to_builtins(right)
        wrong[section] = {**wrong[section], **values}
        assert reference.largest_difference(run_dir, old, wrong) > 1e-5, (section, values)
