"""Every over-age policy, filters and several uses in whole runs: learner, collector, long tails, one buffer."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.buffers.archive import Archive
from asyncrl.buffers.audit import audit
from asyncrl.buffers.base import Member
from asyncrl.buffers.memory import MemoryBuffer
from asyncrl.collectors.engines import simulated
from asyncrl.collectors.scoring import SimulatedScorer
from asyncrl.collectors.service import collect
from asyncrl.config.convert import convert
from asyncrl.config.recipe import Recipe
from asyncrl.learners.batch import BoundBroken
from asyncrl.learners.limits import limits_of
from asyncrl.learners.service import learn
from asyncrl.learners.stepping import LearnerError
from asyncrl.rewards.scoring import Score
from asyncrl.staleness import Weights
from asyncrl.telemetry.metrics import read_metrics, surviving_steps

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

LIMIT_S = 60.0
STEPS = 10
"""A ticket without an end is requeued at 2, 4 and 6, stale at 8: the last groups, which are waited for, are others."""


def recipe_of(**buffer: Any) -> Recipe:
    """Answers whose lengths have a long tail; a group takes about as long as a step, the longest several steps."""
    return convert(
        {
            "run": {"name": "policies", "max_steps": STEPS},
            "buffer": {"max_trajectory_age": 1, **buffer},
            "collector": {
                "engine": {"type": "simulated", "slots": 24, "token_s": 0.004, "mean_tokens": 10.0, "cv": 1.5},
                "group_size": 3,
            },
            "learner": {"groups_per_step": 3, "checkpoint": {"every_steps": 4}},
            "objective": {"preset": "grpo"},  # it masks no token of its own
            "eval": {"at_start": False, "at_end": False},
        }
    )


Ran = Callable[..., Awaitable[tuple[MemoryBuffer, list[dict[str, Any]], Path]]]


@pytest.fixture
def ran(tmp_path: Path, model_path: Path) -> Ran:
    """A run to its end: the buffer, its steps, its folder."""

    async def run(recipe: Recipe) -> tuple[MemoryBuffer, list[dict[str, Any]], Path]:
        buffer = MemoryBuffer(recipe.run.name, limits_of(recipe, max_length=400))
        stop = asyncio.Event()
        collecting = asyncio.ensure_future(collect(recipe, buffer, Member("c", "c-1"), model_path=None, stop=stop))
        try:
            async with asyncio.timeout(LIMIT_S):
                await learn(recipe, buffer, run_dir=tmp_path, model_path=model_path, resume=None, stop=asyncio.Event())
        finally:
            stop.set()
            await collecting
        return buffer, surviving_steps(read_metrics(tmp_path / "metrics.jsonl")), tmp_path

    return run


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ticket 0 takes longer than any run."""
    length = simulated.relative_length
    monkeypatch.setattr(
        simulated, "relative_length", lambda seed, ticket, *rest: 1e4 if ticket == 0 else length(seed, ticket, *rest)
    )


@pytest.fixture
def until_version_3(endless: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ticket 0 ends a few tokens after version 3 is served, with tokens of each version until then."""

    class Engine(simulated.SimulatedEngine):
        async def activate(self, kv: Any = "keep", **options: Any) -> Weights:
            weights = await super().activate(kv, **options)
            if weights.version == 3:
                asyncio.get_running_loop().call_later(0.02, self.end)
            return weights

        def end(self) -> None:
            now = asyncio.get_running_loop().time()
            for generation in [g for g in self._running.values() if g.request.ticket == 0]:
                self._finish(generation, generation.sampled(now), "stop", now)

    monkeypatch.setattr(simulated, "SimulatedEngine", Engine)


async def checked(buffer: MemoryBuffer, steps: list[dict[str, Any]], folder: Path, *, bound: int = 1) -> None:
    """What holds whatever the policy: all steps, the bound, the ledger, the archive."""
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert max(step["age/max"] for step in steps) <= bound
    report = await audit(buffer, Archive(folder / "archive"))
    assert report.problems == []
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["price"]["groups"] == sum(summary["lost"].values())
    assert summary["price"]["masked"] == sum(step["tokens_masked"] for step in steps)


async def test_wait_loses_nothing_and_waits_for_what_would_expire(ran: Ran) -> None:
    buffer, steps, folder = await ran(recipe_of(over_age="wait"))
    await checked(buffer, steps, folder)
    assert {reason for step in steps for reason in step["step_lost"]} <= {"stale/run_end"}
    assert all((step["attempts"], step["tokens_masked"], step["fresh"]) == (1, 0, 1) for step in steps)
    assert sum(step["wait_s"] for step in steps) > 0


@pytest.mark.parametrize(("policy", "loses"), [("drop", "stale/over_age"), ("requeue", "returned/over_age")])
@pytest.mark.usefixtures("endless")
async def test_what_a_policy_loses_is_in_the_metrics_of_the_step_that_lost_it(
    ran: Ran, policy: str, loses: str
) -> None:
    buffer, steps, folder = await ran(recipe_of(over_age=policy))
    await checked(buffer, steps, folder)
    lost = {reason for step in steps for reason in step["step_lost"]}
    assert loses in lost <= {loses, "stale/over_age", "stale/run_end"}
    for sums in ("lost_tokens", "lost_seconds"):
        for reason, total in steps[-1][sums].items():
            assert sum(step[f"step_{sums}"].get(reason, 0) for step in steps) == pytest.approx(total), (sums, reason)
    assert steps[-1]["lost_tokens"][loses] > 0
    assert steps[-1]["lost_seconds"]["cancelled"] > 0  # ticket 0 was taken away, and its collector knows for how long
    assert steps[-1]["lost_length"][loses] > 0
    assert steps[-1]["lost_length"]["trained/trained"] > 0
    assert steps[-1]["returns"].get("over_age", 0) >= (1 if policy == "requeue" else 0)
    assert json.loads((folder / "summary.json").read_text())["lost_length_ratio"] > 0


@pytest.mark.usefixtures("until_version_3")
async def test_mask_trains_a_group_without_its_tokens_beyond_the_bound(ran: Ran) -> None:
    buffer, steps, folder = await ran(recipe_of(over_age="mask"))
    await checked(buffer, steps, folder)
    masked: Counter[str] = Counter()
    for step in steps:
        masked.update(step["age/masked"])
        assert sum(step["age/masked"].values()) == step["tokens_masked"]
    assert masked.total() > 0
    assert min(map(int, masked)) >= 2
    trained = Archive(folder / "archive").trained(masked_beyond=1)
    assert trained.masked == masked.total()
    assert sum(trained.tokens_by_age.values()) == sum(step["tokens"] for step in steps)


@pytest.mark.usefixtures("until_version_3")
async def test_without_the_mask_such_a_group_ends_the_run(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the learner's own check does not rely on the policy."""
    monkeypatch.setattr("asyncrl.learners.batch.beyond", lambda versions, **_: np.zeros(len(versions), bool))
    with pytest.raises(BoundBroken, match="max_trajectory_age is 1"):
        await ran(recipe_of(over_age="mask"))


async def test_a_group_of_several_uses_is_trained_by_several_steps_as_far_as_the_window_allows(ran: Ran) -> None:
    buffer, steps, folder = await ran(recipe_of(max_trajectory_age=3, max_uses=2))
    await checked(buffer, steps, folder, bound=3)
    trained = Archive(folder / "archive").trained()
    assert {len(uses) for uses in trained.uses.values()} <= {1, 2}
    assert any(len(uses) == 2 for uses in trained.uses.values())
    assert all(len(set(tickets)) == len(tickets) for _, tickets in trained.order)
    seen: Counter[int] = Counter()
    for step, (_, tickets) in zip(steps, trained.order, strict=True):
        before = Counter(str(seen[ticket]) for ticket in tickets)
        assert step["uses"] == dict(before)
        assert step["fresh"] == before["0"] / len(tickets)
        seen.update(tickets)


async def test_each_use_is_corrected_from_the_behaviour_logprobs(
    tmp_path: Path, model_path: Path, scripted: Any, draw: Any, make_row: Any, make_group: Any
) -> None:
    """At its first use a group is on policy, ratio 1; at its second the weights have moved, and the ratio says so."""
    recipe = convert(
        {
            "run": {"name": "uses", "max_steps": 4},
            "buffer": {"max_trajectory_age": 1, "max_uses": 2},
            "collector": {"group_size": 4},
            "learner": {"groups_per_step": 2, "learning_rate": 0.01, "warmup_steps": 0},
            "eval": {"at_start": False, "at_end": False},
        }
    )
    buffer = MemoryBuffer(recipe.run.name, limits_of(recipe, max_length=64))
    worker = scripted.ScriptedCollector(buffer, model_path, sample=draw, make_row=make_row, make_group=make_group)
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        group.create_task(
            learn(recipe, buffer, run_dir=tmp_path, model_path=model_path, resume=None, stop=asyncio.Event())
        )
        group.create_task(worker.run())
    steps = surviving_steps(read_metrics(tmp_path / "metrics.jsonl"))
    again = [step for step in steps if step["uses"].get("1")]
    assert again
    assert all(abs(step["by_age"]["0"]["ratio_mean"] - 1) < 1e-5 for step in steps if "0" in step["by_age"])
    assert all(abs(step["by_age"]["1"]["ratio_mean"] - 1) > 1e-5 for step in again)


async def test_filtered_groups_are_replaced_across_a_resume(tmp_path: Path, model_path: Path, scripted: Any) -> None:
    recipe = recipe_of(dynamic_sampling=True)
    buffer = scripted.StoppingBuffer(recipe, at=5)
    end = asyncio.Event()
    collecting = asyncio.ensure_future(collect(recipe, buffer, Member("c", "c-1"), model_path=None, stop=end))
    folders: dict[str, Any] = {"run_dir": tmp_path, "model_path": model_path}
    try:
        async with asyncio.timeout(LIMIT_S):
            await learn(recipe, buffer, **folders, resume=None, stop=buffer.stop)
            await learn(recipe, buffer, **folders, resume=tmp_path / "checkpoints", stop=asyncio.Event())
    finally:
        end.set()
        await collecting
    steps = surviving_steps(read_metrics(tmp_path / "metrics.jsonl"))
    await checked(buffer, steps, tmp_path)
    assert all(step["zero_variance"] == 0 for step in steps)
    assert steps[-1]["lost"]["filtered/zero_variance"] > 0


async def test_a_run_that_fills_no_batch_ends_with_advice(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    async def right(*_: Any, **__: Any) -> Score:
        return Score({"simulated": 1.0}, 1.0, "")

    monkeypatch.setattr(SimulatedScorer, "score", right)
    with pytest.raises(LearnerError, match=r"the last \d+ groups were all left out .*\n?.*every answer is right"):
        await ran(recipe_of(dynamic_sampling=True, max_empty_fills=2))
