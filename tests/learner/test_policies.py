"""Every over-age policy, filters and several uses in whole runs: learner, collector, long tails, one buffer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffers.archive import Archive
from asyncrl.buffers.audit import audit
from asyncrl.buffers.base import Member
from asyncrl.buffers.memory import MemoryBuffer
from asyncrl.collectors.service import collect
from asyncrl.config.convert import convert
from asyncrl.config.recipe import Recipe
from asyncrl.learners.limits import limits_of
from asyncrl.learners.service import learn
from asyncrl.telemetry.metrics import read_metrics, surviving_steps

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

LIMIT_S = 60.0
STEPS = 8


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


async def checked(buffer: MemoryBuffer, steps: list[dict[str, Any]], folder: Path, *, masked: bool = False) -> None:
    """What holds whatever the policy: all steps, the bound, the ledger, the archive."""
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert max(step["age/max"] for step in steps) <= 1
    if not masked:
        report = await audit(buffer, Archive(folder / "archive"))
        assert report.problems == []
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["price"]["groups"] == sum(summary["lost"].values())
    assert summary["price"]["masked"] == sum(step["tokens_masked"] for step in steps)


@pytest.mark.parametrize("policy", ["wait", "drop", "requeue"])
async def test_each_policy_trains_within_the_bound_and_says_what_it_cost(ran: Ran, policy: str) -> None:
    buffer, steps, folder = await ran(recipe_of(over_age=policy))
    await checked(buffer, steps, folder)
    lost = {reason for step in steps for reason in step["step_lost"]} - {"stale/run_end"}
    assert (
        lost <= {"wait": set(), "drop": {"stale/over_age"}, "requeue": {"returned/over_age", "stale/over_age"}}[policy]
    )
    assert all(step["tokens_masked"] == 0 for step in steps)
    assert all(step["attempts"] >= 1 for step in steps)
    if policy == "wait":
        assert all(step["attempts"] == 1 for step in steps)
