"""The reward part `tool-call` in a verifier process: tools that hang, end it, or want too much memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncrl.config.recipe import Collector, ErrandsTask
from asyncrl.config.rewards import ToolCall, ToolPolicy
from asyncrl.rewards.scoring import Score
from asyncrl.tasks.base import Answer, Row
from asyncrl.tasks.verify import scoring_of

TOOLS = """
import os, time

def work(how):
    if how == "sleep":
        time.sleep(600)
    if how == "loop":
        while True: pass
    if how == "in C":
        sum(range(10**15))  # never looks whether a signal came
    if how == "end":
        os._exit(0)
    if how == "memory":
        bytearray(1 << 40)
    return how
"""
SCHEMA = {"type": "function", "function": {"name": "work", "parameters": {"type": "object"}}}


async def scores(folder: Path, monkeypatch: pytest.MonkeyPatch, *how: str) -> list[Score]:
    """Of right calls of the tool, in one verifier process."""
    (folder / "working_tools.py").write_text(TOOLS)
    monkeypatch.chdir(folder)
    policy = ToolPolicy(name="work", function="working_tools:work")
    part = ToolCall(tool_format="json", tools=[policy], call_timeout_s=0.3, timeout_s=2.0)
    scoring = scoring_of(ErrandsTask(rewards=[part]), Collector(score_memory_limit="1GiB"), seed=0, max_tokens=72)
    await asyncio.wait_for(scoring.start(), 60)
    try:
        calls = [f'{{"name": "work", "arguments": {{"how": "{each}"}}}}' for each in how]
        rows = [Row(str(n), "work", call, {"tools": [SCHEMA]}) for n, call in enumerate(calls)]
        answers = [Answer(call, (1,), "stop") for call in calls]
        return await asyncio.wait_for(asyncio.gather(*map(scoring.score, rows, answers)), 90)
    finally:
        await scoring.close()


@pytest.mark.asyncio
async def test_a_tool_that_takes_too_long_is_the_answers_fault_and_costs_only_the_execution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept, looped, fine = await scores(tmp_path, monkeypatch, "sleep", "loop", "quickly")
    assert [score.wrong for score in (slept, looped, fine)] == ["timeout", "timeout", ""]
    assert [score.reward for score in (slept, looped, fine)] == pytest.approx([0.8, 0.8, 1.0])
    assert slept.detail == "work took longer than call_timeout_s = 0.3 s"


@pytest.mark.asyncio
async def test_a_tool_that_cannot_be_interrupted_or_ends_its_process_leaves_its_own_answer_unscored_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await scores(tmp_path, monkeypatch, "in C", "end", "memory", "quickly")
    assert [score.failure for score in found] == ["verifier_timeout", "verifier_died", "verifier_memory", ""]
    assert found[-1].reward == pytest.approx(1.0)
