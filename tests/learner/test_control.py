"""Whole learners whose rate follows their data, and one whose data collapse."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from asyncrl.buffers.memory import MemoryBuffer
from asyncrl.config.recipe import Buffer, Checkpoint, Collector, Eval, Learner, Objective, Recipe, Run
from asyncrl.learners.checkpoint import find_resumable
from asyncrl.learners.limits import limits_of
from asyncrl.learners.optimize import learning_rate
from asyncrl.learners.pace import EssCollapsed, Pace, after_measuring, after_step
from asyncrl.learners.service import learn
from asyncrl.telemetry import names
from asyncrl.telemetry.metrics import read_metrics, surviving_steps
from asyncrl.telemetry.text import event_line

LIMIT_S = 60.0
RECIPE = Recipe(
    run=Run(name="control", max_steps=6),
    buffer=Buffer(max_trajectory_age=2),
    collector=Collector(group_size=4),
    learner=Learner(
        groups_per_step=4,
        learning_rate=2e-2,
        warmup_steps=3,
        rate_by_ess=True,
        checkpoint=Checkpoint(every_steps=100, keep_last=3),
    ),
    objective=Objective(preset="grpo"),
    eval=Eval(at_start=False, at_end=False),
)


@pytest.fixture
def collector(
    model_path: Path,
    draw: Callable[..., Any],
    make_row: Callable[..., Any],
    make_group: Callable[..., Any],
    scripted: Any,
) -> Callable[..., Any]:
    return lambda buffer: scripted.ScriptedCollector(
        buffer, model_path, sample=draw, make_row=make_row, make_group=make_group, lag=1
    )


def saved_pace(run_dir: Path) -> tuple[int, Pace]:
    """Version and control of the newest checkpoint."""
    found = find_resumable(run_dir / "checkpoints")
    assert found is not None
    state = torch.load(found.folder / "training.pt", weights_only=True)
    return found.weights.version, Pace(**state["optimizer"]["pace"])


@pytest.mark.asyncio
async def test_the_rate_follows_each_steps_own_data_and_a_resumed_learner_goes_on_to_the_bit(
    tmp_path: Path, model_path: Path, collector: Any, scripted: Any
) -> None:
    buffer = scripted.StoppingBuffer(RECIPE, at=3)
    options: dict[str, Any] = {"run_dir": tmp_path, "model_path": model_path}
    collecting = asyncio.create_task(collector(buffer).run())
    async with asyncio.timeout(LIMIT_S):
        await learn(RECIPE, buffer, resume=None, stop=buffer.stop, **options)
        stopped = saved_pace(tmp_path)
        await learn(RECIPE, buffer, resume=tmp_path / "checkpoints", stop=asyncio.Event(), **options)
        await collecting
    records = read_metrics(tmp_path / "metrics.jsonl")
    events = {record["version"]: record for record in records if record.get("event") == "learning_rate"}
    steps = surviving_steps(records)
    assert [step["lineage"] for step in steps] == [1] * 3 + [2] * 3

    # What the checkpoints have follows from what each step has measured, with no rounding and no step left out.
    pace, paces = Pace(), {}
    for step in steps:
        before, pace = pace, after_measuring(pace, step["ess/sequence"])
        assert step["learning_rate"] == learning_rate(RECIPE.learner, step["step"] - 1) * pace.scale
        assert (step["version"] in events) is (pace.scale != before.scale)
        if event := events.get(step["version"]):
            assert set(event) == {"event", "time", *names.EVENTS["learning_rate"]}
            assert (event["scale_before"], event["scale"]) == (before.scale, pace.scale)
            assert (event["ess"], event["average"]) == (step["ess/sequence"], pace.average)
            assert event_line(event).startswith(f"learning rate x {pace.scale:.3f} from step {step['version']} on")
        paces[step["version"]] = pace = after_step(pace, step["ess/sequence"], limit=None)
    assert stopped == (3, paces[3])
    assert saved_pace(tmp_path) == (6, paces[6])
    assert events, "no step was far enough from its data: the test has seen nothing"
    assert paces[3].average < 1.0, "the resumed learner had nothing to go on from"


@pytest.mark.asyncio
async def test_data_that_collapse_end_the_run_with_numbers_and_advice(
    tmp_path: Path, model_path: Path, collector: Any
) -> None:
    """An absurd rate: after a step or two, nothing that was sampled is likely any more."""
    learner = replace(RECIPE.learner, learning_rate=1.0, warmup_steps=0, min_ess=0.4, max_low_ess_steps=2)
    recipe = replace(RECIPE, run=replace(RECIPE.run, max_steps=60), learner=replace(learner, rate_by_ess=False))
    buffer = MemoryBuffer(recipe.run.name, limits_of(recipe, max_length=64))
    collecting = asyncio.create_task(collector(buffer).run())
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(EssCollapsed, match=r"below 0\.4 in 2 steps in a row, in the last 0\.\d+ .*\nLower learner"):
            await learn(recipe, buffer, run_dir=tmp_path, model_path=model_path, resume=None, stop=asyncio.Event())
        await collecting  # was told that the run is over
    assert (await buffer.stats()).phase == "ended"
    steps = surviving_steps(read_metrics(tmp_path / "metrics.jsonl"))
    assert len(steps) < 60
    assert all(step["ess/sequence"] < 0.4 for step in steps[-2:])
