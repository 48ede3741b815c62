"""Checkpoints of other versions of asyncrl: older ones are resumed from, newer ones refused."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.buffers.memory import MemoryBuffer
from asyncrl.config.recipe import Buffer, Checkpoint, Collector, Eval, Learner, Objective, Recipe, Run
from asyncrl.learners.checkpoint import CheckpointError, find_resumable, load
from asyncrl.learners.limits import limits_of
from asyncrl.learners.parallel import ALONE
from asyncrl.learners.randomness import gathered, restore
from asyncrl.learners.service import learn
from asyncrl.staleness import Weights
from asyncrl.telemetry.metrics import read_metrics

LIMIT_S = 60.0
CPU = torch.device("cpu")

OLD = Path(__file__).with_name("format-1")
"""A run of two steps that was stopped, as the last asyncrl of format 1 left it."""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    shutil.copytree(OLD, tmp_path / "old")
    return tmp_path / "old"


@pytest.mark.asyncio
async def test_a_run_goes_on_from_a_checkpoint_of_format_1(
    old: Path, draw: Callable[..., Any], make_row: Callable[..., Any], make_group: Callable[..., Any], scripted: Any
) -> None:
    first = load(old / "checkpoints" / "version-000002")
    assert first.manifest.format == 1
    state = first.training_state()
    assert [set(rank) for rank in state["rng"]] == [{"cpu", "cuda"}]
    assert state["optimizer"]["steps"] == 2

    recipe = Recipe(
        run=Run(name="learner-test", max_steps=4),
        buffer=Buffer(max_trajectory_age=1),
        collector=Collector(group_size=4),
        learner=Learner(
            groups_per_step=3,
            learning_rate=1e-2,
            warmup_steps=4,
            max_tokens_per_microbatch=30,
            checkpoint=Checkpoint(every_steps=100, keep_last=2),
        ),
        objective=Objective(preset="grpo"),
        eval=Eval(at_start=False, at_end=False),
    )
    buffer = MemoryBuffer(recipe.run.name, limits_of(recipe, max_length=64))
    model = first.folder
    collector = scripted.ScriptedCollector(buffer, model, sample=draw, make_row=make_row, make_group=make_group)
    async with asyncio.timeout(LIMIT_S):
        collecting = asyncio.create_task(collector.run())
        resume = old / "checkpoints"
        await learn(recipe, buffer, run_dir=old, model_path=model, resume=resume, stop=asyncio.Event())
        await collecting
    steps = [record for record in read_metrics(old / "metrics.jsonl") if "event" not in record]
    assert [(step["step"], step["learning_rate"]) for step in steps] == [(3, 0.0075), (4, 0.01)]
    newest = find_resumable(old / "checkpoints")
    assert newest is not None
    assert (newest.weights, newest.manifest.format) == (Weights(2, 4), 2)
    assert newest.manifest.forks == {1: (0, 0), 2: (1, 2)}
    moments = state["optimizer"]["adam"]["state"][0]["exp_avg_sq"]
    assert not torch.equal(newest.training_state()["optimizer"]["adam"]["state"][0]["exp_avg_sq"], moments)


def test_a_checkpoint_of_a_newer_format_is_refused_with_a_sentence(old: Path) -> None:
    folder = old / "checkpoints" / "version-000002"
    manifest = json.loads((folder / "checkpoint.json").read_text())
    (folder / "checkpoint.json").write_text(json.dumps(manifest | {"format": 3, "more": "than we know"}))
    with pytest.raises(CheckpointError) as refused:
        load(folder)
    told = "has format 3, this program reads 1 to 2; a newer asyncrl wrote it: resume with that"
    assert str(refused.value) == f"{folder} {told}"


def test_each_rank_goes_on_with_its_own_random_numbers() -> None:
    torch.manual_seed(1)
    first = gathered(ALONE, CPU)[0]
    expected = torch.rand(4)
    torch.manual_seed(2)
    second = gathered(ALONE, CPU)[0]
    other = torch.rand(4)
    restore([first, second], 0, CPU)
    assert torch.equal(torch.rand(4), expected)
    restore([first, second], 1, CPU)
    assert torch.equal(torch.rand(4), other)
    torch.manual_seed(3)
    own = torch.rand(4)
    torch.manual_seed(3)
    restore([first, second], 2, CPU)  # a third rank, which the checkpoint's learner had not
    assert torch.equal(torch.rand(4), own)
