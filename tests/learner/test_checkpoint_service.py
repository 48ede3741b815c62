"""A learner whose checkpoints are written beside its steps: all of it, on the reference buffer."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.buffers.archive import Archive
from asyncrl.buffers.audit import audit
from asyncrl.buffers.base import Commit, Member
from asyncrl.buffers.memory import MemoryBuffer
from asyncrl.config.recipe import Buffer, Checkpoint, Collector, Eval, Learner, Objective, Recipe, Run
from asyncrl.learners import writing
from asyncrl.learners.checkpoint import CheckpointError, load, survey
from asyncrl.learners.evaluation import result_of
from asyncrl.learners.limits import limits_of
from asyncrl.learners.service import learn
from asyncrl.staleness import Weights
from asyncrl.telemetry.metrics import read_metrics

LIMIT_S = 60.0


def recipe_of(steps: int, *, evaluation: Eval | None = None, **checkpoint: Any) -> Recipe:
    return Recipe(
        run=Run(name="learner-test", max_steps=steps),
        buffer=Buffer(max_trajectory_age=1),
        collector=Collector(group_size=4),
        learner=Learner(
            groups_per_step=3,
            learning_rate=1e-2,
            max_tokens_per_microbatch=30,
            checkpoint=Checkpoint(**checkpoint),
        ),
        objective=Objective(preset="grpo"),
        eval=evaluation or Eval(at_start=False, at_end=False),
    )


class Watched(MemoryBuffer):
    """Says what is told of checkpoints, and calls `at` with each version that a commit has made."""

    def __init__(self, recipe: Recipe, at: Callable[[int], None] = lambda _: None) -> None:
        super().__init__(recipe.run.name, limits_of(recipe, max_length=64))
        self.at = at
        self.told: list[tuple[int, int | None]] = []  # version, the oldest that is kept
        self.folders: list[list[str]] = []  # what was there when it was told
        self.checkpoints = Path()

    async def commit(self, lineage: int, step: int, *, skipped: bool = False) -> Commit:
        commit = await super().commit(lineage, step, skipped=skipped)
        self.at(commit.version)
        return commit

    async def checkpointed(self, lineage: int, version: int, *, oldest: int | None = None) -> None:
        self.told.append((version, oldest))
        self.folders.append(sorted(path.name for path in self.checkpoints.glob("version-*")))
        await super().checkpointed(lineage, version, oldest=oldest)


@pytest.fixture
def run(
    tmp_path: Path, model_path: Path, draw: Any, make_row: Any, make_group: Any, scripted: Any
) -> Callable[..., Any]:
    """Run a recipe on a buffer in `tmp_path`, until its end or `stop`; returns the collector."""

    async def run(recipe: Recipe, buffer: Watched, stop: asyncio.Event | None = None) -> Any:
        buffer.checkpoints = tmp_path / "checkpoints"
        worker = scripted.ScriptedCollector(buffer, model_path, sample=draw, make_row=make_row, make_group=make_group)
        async with asyncio.timeout(LIMIT_S):
            collecting = asyncio.create_task(worker.run())
            try:
                stop = stop or asyncio.Event()
                await learn(recipe, buffer, run_dir=tmp_path, model_path=model_path, resume=None, stop=stop)
            finally:
                if stop.is_set():  # the run goes on for collectors
                    await buffer.finish()
                await collecting
        return worker

    return run


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    return [record for record in read_metrics(folder / "metrics.jsonl") if record.get("event") == name]


@pytest.mark.asyncio
async def test_training_goes_on_while_a_checkpoint_is_written_and_nothing_of_later_steps_is_in_it(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = threading.Event()
    save_model = writing.save_model

    def slowly(*arguments: Any) -> None:
        assert opened.wait(LIMIT_S)
        save_model(*arguments)

    monkeypatch.setattr(writing, "save_model", slowly)
    recipe = recipe_of(6, every_steps=2, keep_last=2)
    # The write of version 2 ends only after the commit of version 4, whose checkpoint is then due and waits for it.
    buffer = Watched(recipe, at=lambda version: opened.set() if version == 4 else None)
    worker = await run(recipe, buffer)

    assert buffer.told == [(2, 2), (4, 2), (6, 4)]
    assert [folders[-1] for folders in buffer.folders] == ["version-000002", "version-000004", "version-000006"]
    records = read_metrics(tmp_path / "metrics.jsonl")
    order = [(record.get("event", "step"), record.get("version")) for record in records]
    assert order.index(("checkpoint", 2)) > order.index(("step", 3))
    assert [event["version"] for event in events(tmp_path, "checkpoint")] == [2, 4, 6]
    assert all(event["checkpoint/save_s"] > 0 for event in events(tmp_path, "checkpoint"))

    sound, _ = survey(tmp_path / "checkpoints")
    assert [found.manifest.trained for found in sound] == [[(1, 4), (1, 5)], [(1, 2), (1, 3)]]
    totals = {record["version"]: record["tokens_total"] for record in records if "event" not in record}
    for found in sound:
        served, weights = worker.served.get(found.weights), load_file(found.folder / "model.safetensors")
        assert found.manifest.tokens == totals[found.weights.version]
        if served is not None:
            assert all(torch.equal(weights[name], tensor) for name, tensor in served.items() if name in weights)
    report = await audit(buffer, Archive(tmp_path / "archive"))
    assert report.problems == []


@pytest.mark.asyncio
async def test_a_stop_awaits_the_checkpoint_that_is_being_written_and_then_has_the_last_step_saved(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, opened = asyncio.Event(), threading.Event()
    save_model = writing.save_model

    def slowly(*arguments: Any) -> None:
        assert opened.wait(LIMIT_S)
        save_model(*arguments)

    def at(version: int) -> None:
        if version == 3:  # that of version 2 is being written, until the learner has long been told to stop
            stop.set()
            asyncio.get_running_loop().call_later(0.5, opened.set)

    monkeypatch.setattr(writing, "save_model", slowly)
    recipe = recipe_of(6, every_steps=2, keep_last=2)
    buffer = Watched(recipe, at=at)
    await run(recipe, buffer, stop)
    assert buffer.told == [(2, 2), (3, 2)]
    sound, damaged = survey(tmp_path / "checkpoints")
    assert ([found.weights.version for found in sound], damaged) == ([3, 2], [])


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.asyncio
async def test_a_run_goes_on_without_a_checkpoint_that_could_not_be_written(
    async_save: bool, tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = [False]
    save_model = writing.save_model

    def sometimes(*arguments: Any) -> None:
        if broken[0]:
            raise OSError(28, "No space left on device")
        save_model(*arguments)

    monkeypatch.setattr(writing, "save_model", sometimes)
    recipe = recipe_of(6, every_steps=1, keep_last=9, async_save=async_save)

    def at(version: int) -> None:
        broken[0] = version in (3, 4)

    buffer = Watched(recipe, at=at)
    await run(recipe, buffer)
    sound, damaged = survey(tmp_path / "checkpoints")
    saved = [found.weights.version for found in sound]
    assert damaged == []
    assert saved[0] == 6
    warnings = [event["text"] for event in events(tmp_path, "warning") if event["about"] == "checkpoint"]
    assert warnings
    assert all("No space left on device" in text and str(tmp_path / "checkpoints") in text for text in warnings)
    assert sorted(step for found in sound for step in found.manifest.trained) == [(1, step) for step in range(6)]
    if not async_save:
        assert saved == [6, 5, 2, 1]
        assert [found.manifest.trained for found in sound][1] == [(1, 2), (1, 3), (1, 4)]
    assert buffer.told[-1] == (6, saved[-1])


@pytest.mark.asyncio
async def test_a_last_checkpoint_that_cannot_be_written_is_the_runs_error_and_collectors_are_told(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "save_model", full)
    recipe = recipe_of(2, every_steps=1)
    buffer = Watched(recipe)
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*version-000002: .*No space left"):
        await run(recipe, buffer)  # whose collector ends, since it is told
    stats = await buffer.stats()
    assert (stats.phase, stats.version) == ("ended", 2)
    assert buffer.told == []
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.asyncio
async def test_versions_are_evaluated_beside_training_and_the_best_of_them_are_kept(tmp_path: Path, run: Any) -> None:
    evaluation = Eval(at_start=False, at_end=True, every_steps=2, prompts=4)
    recipe = recipe_of(8, evaluation=evaluation, every_steps=1, keep_last=1, keep_best=1, keep_every=3)
    buffer = Watched(recipe)
    await run(recipe, buffer)
    success = {event["version"]: event["success"] for event in events(tmp_path, "eval")}
    assert max(success) == 8
    assert set(success) <= {2, 4, 6, 8}
    assert len(success) > 1
    kept = {load(folder).weights.version for folder in (tmp_path / "checkpoints").iterdir()}
    assert {3, 6, 8} <= kept
    assert buffer.told[-1] == (8, 8), "what is kept beside the newest does not keep rows in the store"
    assert kept <= {3, 6, 8, *success}
    assert len(kept) <= 4
    assert Weights(1, 8) in {load(folder).weights for folder in (tmp_path / "checkpoints").iterdir()}


def test_the_best_checkpoints_are_the_best_by_the_metric_that_the_recipe_names(tmp_path: Path) -> None:
    """Also with evaluations of before there were others, which have a success alone."""
    metrics = {"pass@4": {"value": 0.75}, "majority@4": {"value": None}}
    written = {"success": 0.5, "report": {"metrics": metrics}}
    (tmp_path / "eval-1-2.json").write_text(json.dumps(written))
    (tmp_path / "eval-1-4.json").write_text(json.dumps({"success": 0.25}))
    found = {
        metric: [result_of(tmp_path, Weights(1, version), metric=metric) for version in (2, 4, 6)]
        for metric in ("reward", "pass@4", "majority@4")
    }
    assert found == {"reward": [0.5, 0.25, None], "pass@4": [0.75, None, None], "majority@4": [None, None, None]}


@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.asyncio
async def test_an_evaluation_that_nobody_can_make_any_more_is_not_waited_for(
    at_end: bool, tmp_path: Path, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Forgetting(Watched):
        """Nobody gets to evaluate version 2."""

        async def claim_evaluation(self, member: Member, request_id: str) -> bool:
            return request_id != "eval-1-2" and await super().claim_evaluation(member, request_id)

    evaluation = Eval(at_start=False, at_end=at_end, every_steps=2, prompts=4)
    recipe = recipe_of(3, evaluation=evaluation, every_steps=100)
    assert recipe.weights.deadline_s > LIMIT_S  # for which it would wait, if the weights were still served
    await run(recipe, Forgetting(recipe))
    assert [event["version"] for event in events(tmp_path, "eval")] == [3] * at_end
    assert "eval-1-2 is skipped: no collector has answered it" in caplog.text
