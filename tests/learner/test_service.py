"""The learner's loop, whole, on the reference buffer with a scripted collector."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.buffers.archive import Archive
from asyncrl.buffers.audit import audit
from asyncrl.buffers.base import Fenced, State
from asyncrl.buffers.memory import MemoryBuffer
from asyncrl.config.recipe import Buffer, Checkpoint, Collector, Eval, Learner, Objective, Recipe, Run
from asyncrl.learners.checkpoint import CheckpointError, find_resumable
from asyncrl.learners.limits import limits_of
from asyncrl.learners.optimize import TooManySkipped
from asyncrl.learners.service import learn
from asyncrl.learners.stepping import LearnerError, RunEnded
from asyncrl.staleness import Weights
from asyncrl.telemetry import names
from asyncrl.telemetry.metrics import read_metrics, surviving_steps

LIMIT_S = 60.0


def recipe_of(steps: int, *, age: int = 1, checkpoint_every: int = 100, **run: Any) -> Recipe:
    return Recipe(
        run=Run(name="learner-test", max_steps=steps, **run),
        buffer=Buffer(max_trajectory_age=age),
        collector=Collector(group_size=4),
        learner=Learner(
            groups_per_step=3,
            learning_rate=1e-2,
            warmup_steps=2,
            max_tokens_per_microbatch=30,
            checkpoint=Checkpoint(every_steps=checkpoint_every, keep_last=2),
        ),
        objective=Objective(preset="grpo"),
        eval=Eval(prompts=8),
    )


@pytest.fixture
def collector(
    model_path: Path,
    draw: Callable[..., Any],
    make_row: Callable[..., Any],
    make_group: Callable[..., Any],
    scripted: Any,
) -> Callable[..., Any]:
    return lambda buffer, **options: scripted.ScriptedCollector(
        buffer, model_path, sample=draw, make_row=make_row, make_group=make_group, **options
    )


def check_names(records: list[dict[str, Any]]) -> None:
    """What a run writes is what `names` documents, key by key."""
    for record in records:
        if "event" in record:
            assert set(record) == {"event", "time", *names.EVENTS[record["event"]]}
            continue
        written = {"reward_part/<name>" if key.startswith("reward_part/") else key for key in record}
        of_mixtures = {"reward/mean/<name>", "reward/std/<name>", "outcome/mean/<name>", "reward_part/<name>/<name>"}
        sometimes = {"nonfinite_values", *of_mixtures}
        assert written - sometimes == set(names.step_names()) - sometimes
        for buckets in (record["by_age"], record["by_length"]):
            assert all(set(bucket) == set(names.BUCKET) for bucket in buckets.values())


def buffer_of(recipe: Recipe) -> MemoryBuffer:
    return MemoryBuffer(recipe.run.name, limits_of(recipe, max_length=64))


async def together(*work: Any) -> None:
    """Run until all are done; the first error ends them all."""
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        for one in work:
            group.create_task(one)


@pytest.mark.asyncio
async def test_a_run_trains_archives_evaluates_and_ends(tmp_path: Path, model_path: Path, collector: Any) -> None:
    recipe = recipe_of(6, checkpoint_every=4)
    buffer = buffer_of(recipe)
    worker = collector(buffer, lag=1)
    await together(
        learn(recipe, buffer, run_dir=tmp_path, model_path=model_path, resume=None, stop=asyncio.Event()), worker.run()
    )
    stats = await buffer.stats()
    assert (stats.phase, stats.version, stats.states[State.TRAINED]) == ("ended", 6, 18)

    records = read_metrics(tmp_path / "metrics.jsonl")
    steps = surviving_steps(records)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert all(step["age/max"] <= 1 for step in steps)
    assert any(step["age/max"] == 1 for step in steps)
    assert all(step["mismatch/age0"] is None or step["mismatch/age0"] < 1e-5 for step in steps)
    assert steps[0]["ratio/mean"] == pytest.approx(1, abs=1e-5)
    assert any(abs(step["ratio/max"] - 1) > 1e-3 for step in steps)  # age 1 is another policy
    assert [record["version"] for record in records if record.get("event") == "checkpoint"] == [4, 6]
    check_names(records)

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["eval_n"], summary["stopped"]) == (6, 8, False)
    assert summary["success_before"] is not None
    assert summary["success_after"] is not None
    assert len(summary["prompts"]) == 3
    assert {path.name for path in (tmp_path / "eval").iterdir()} == {"eval-1-0.json", "eval-1-6.json"}

    archive = Archive(tmp_path / "archive")
    trained = archive.trained()
    assert len(trained.order) == 6
    covered = sorted(n for step, tickets in trained.order if step.version < 4 for n in tickets)
    assert archive.ledger.table(lambda weights: True)["ordinal"].to_pylist() == covered  # by the oldest checkpoint kept
    report = await audit(buffer, archive)
    assert report.problems == []
    assert sum(report.stats.archived.values()) == len(covered)
    assert sorted(trained.uses) == sorted({n for _, tickets in trained.order for n in tickets})
    assert sum(trained.tokens_by_age.values()) == summary["tokens"]

    final = AutoModelForCausalLM.from_pretrained(summary["checkpoint"])
    AutoTokenizer.from_pretrained(summary["checkpoint"])
    served = worker.served[Weights(1, 6)]
    for name, tensor in final.state_dict().items():
        if name in served:
            assert torch.equal(tensor, served[name]), name


@pytest.mark.asyncio
async def test_stopping_checkpoints_and_a_resumed_run_goes_on_from_there(
    tmp_path: Path, model_path: Path, collector: Any, scripted: Any
) -> None:
    recipe = recipe_of(5, checkpoint_every=2)
    buffer = scripted.StoppingBuffer(recipe, at=3)
    worker = collector(buffer)
    collecting = asyncio.create_task(worker.run())
    async with asyncio.timeout(LIMIT_S):
        await learn(recipe, buffer, run_dir=tmp_path, model_path=model_path, resume=None, stop=buffer.stop)
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert summary["stopped"] is True
        found = find_resumable(tmp_path / "checkpoints")
        assert found is not None
        assert found.weights == Weights(1, summary["steps"])

        await learn(
            recipe,
            buffer,
            run_dir=tmp_path,
            model_path=model_path,
            resume=tmp_path / "checkpoints",
            stop=asyncio.Event(),
        )
        await collecting
    whole = json.loads((tmp_path / "summary.json").read_text())
    assert (whole["steps"], whole["steps_now"]) == (5, 5 - summary["steps"])
    assert whole["tokens_now"] == whole["tokens"] - summary["tokens"] > 0  # those of its `seconds`
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [step["step"] for step in surviving_steps(records)] == [1, 2, 3, 4, 5]
    assert [record["lineage"] for record in records if record.get("event") == "start"] == [1, 2]
    tokens = [step["tokens_total"] for step in surviving_steps(records)]
    assert tokens == sorted(tokens)
    rates = [step["learning_rate"] for step in surviving_steps(records)]
    assert rates == [0.005, 0.01, 0.01, 0.01, 0.01]  # warm-up is not begun again
    assert (await buffer.stats()).states[State.TRAINED] == 15
    latest = find_resumable(tmp_path / "checkpoints")
    assert latest is not None
    assert latest.weights == Weights(2, 5)
    assert latest.manifest.forks == {1: (0, 0), 2: (1, summary["steps"])}


@pytest.mark.asyncio
async def test_a_learner_that_was_replaced_stops_and_writes_nothing_more(
    tmp_path: Path, model_path: Path, collector: Any
) -> None:
    recipe = recipe_of(50)
    buffer = buffer_of(recipe)
    worker = collector(buffer)
    old = asyncio.create_task(
        learn(recipe, buffer, run_dir=tmp_path / "a", model_path=model_path, resume=None, stop=asyncio.Event())
    )
    collecting = asyncio.create_task(worker.run())
    async with asyncio.timeout(LIMIT_S):
        while (await buffer.stats()).version < 2:
            await buffer.nudge(worker.member, 0.05)
        await buffer.new_lineage(parent=None, limits=limits_of(recipe, max_length=64))
        with pytest.raises(Fenced, match="lineage 2"):
            await old
        assert not (tmp_path / "a" / "checkpoints").exists()
        assert not (tmp_path / "a" / "summary.json").exists()
        assert (await buffer.stats()).phase == "running"  # the new learner's run is not ended by the old one
        await buffer.finish()
        await collecting


@pytest.mark.asyncio
async def test_equal_rewards_and_unscored_groups_do_not_stop_a_run(
    tmp_path: Path, model_path: Path, collector: Any
) -> None:
    recipe = recipe_of(4)
    buffer = buffer_of(recipe)
    calls = iter(range(10**6))

    def reward(_: list[int]) -> float:
        return math.nan if (next(calls) // 4) % 3 == 1 else 1.0  # every third group has no score at all

    await together(
        learn(recipe, buffer, run_dir=tmp_path, model_path=model_path, resume=None, stop=asyncio.Event()),
        collector(buffer, reward=reward).run(),
    )
    steps = surviving_steps(read_metrics(tmp_path / "metrics.jsonl"))
    assert [step["skipped"] for step in steps] == [False] * 4
    assert all(step["zero_variance"] == 1.0 and step["unscored"] == 4 and step["grad_norm"] == 0.0 for step in steps)


@pytest.mark.asyncio
async def test_a_verifier_that_scores_nothing_ends_the_run_with_the_reason(
    tmp_path: Path, model_path: Path, collector: Any
) -> None:
    recipe = recipe_of(50)
    buffer = buffer_of(recipe)
    collecting = asyncio.create_task(collector(buffer, reward=lambda _: math.nan).run())
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(TooManySkipped, match="3 steps in a row changed nothing; the last: no token to train"):
            await learn(recipe, buffer, run_dir=tmp_path, model_path=model_path, resume=None, stop=asyncio.Event())
        await collecting  # was told that the run is over
    stats = await buffer.stats()
    assert stats.version == 3  # skipped steps consumed their batches
    assert stats.phase == "ended"


@pytest.mark.asyncio
async def test_no_collector_at_all_ends_the_run_with_the_name_of_what_is_missing(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.learners.stepping.ROUND_S", 0.1)
    recipe = recipe_of(5, no_progress_s=0.3)
    buffer = buffer_of(recipe)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(LearnerError, match=r"no step for .* step 1 waits: .*collector.*\nwho +waits for"):
            await learn(recipe, buffer, run_dir=tmp_path, model_path=model_path, resume=None, stop=asyncio.Event())


@pytest.mark.asyncio
async def test_a_collector_that_ends_the_run_ends_its_learner_with_a_checkpoint_and_its_words(
    tmp_path: Path, model_path: Path, collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.learners.stepping.ROUND_S", 0.1)
    recipe = recipe_of(500)
    buffer = buffer_of(recipe)
    scores = itertools.count()
    ending: list[asyncio.Future[None]] = []

    def reward(_: list[int]) -> float:
        n = next(scores)
        if n == 40:
            ending.append(asyncio.ensure_future(buffer.finish(error="collector c: the verifiers fail")))
        return float(n % 2)

    collecting = asyncio.create_task(collector(buffer, reward=reward).run())
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(RunEnded, match=r"^collector c: the verifiers fail$"):
            await learn(recipe, buffer, run_dir=tmp_path, model_path=model_path, resume=None, stop=asyncio.Event())
        await collecting
    stats = await buffer.stats()
    assert stats.error == "collector c: the verifiers fail"
    (newest, *_) = sorted((tmp_path / "checkpoints").iterdir(), reverse=True)
    assert newest.name == f"version-{stats.version:06d}", "what was trained is saved"
    assert stats.version > 0


@pytest.mark.asyncio
async def test_resuming_where_no_checkpoint_will_do_is_refused(tmp_path: Path, model_path: Path) -> None:
    recipe = recipe_of(5)
    damaged = tmp_path / "checkpoints" / "version-000004"
    damaged.mkdir(parents=True)
    buffer = buffer_of(recipe)
    with pytest.raises(CheckpointError, match="version-000004 is damaged or unfinished"):
        await learn(
            recipe, buffer, run_dir=tmp_path, model_path=model_path, resume=damaged.parent, stop=asyncio.Event()
        )
