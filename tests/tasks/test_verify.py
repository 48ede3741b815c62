"""Recipe to score: the pool's processes build the recipe's task."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.recipe import CustomTask, DataSource, ReverseTask, RewardPart, SingleTurnTask, Task
from asyncrl.rewards.pool import Score, VerifierError
from asyncrl.tasks.base import Answer, Row
from asyncrl.tasks.verify import verifier_pool

UserModule = Callable[[str], Path]


async def scored(config: Task, *calls: tuple[Row, Answer]) -> list[Score]:
    pool = verifier_pool(config, seed=7, workers=2, timeout_s=30)
    await asyncio.wait_for(pool.start(), 60)
    try:
        return await asyncio.wait_for(asyncio.gather(*(pool.score(row, answer) for row, answer in calls)), 60)
    finally:
        await pool.close()


@pytest.mark.asyncio
async def test_reverse_is_scored() -> None:
    row = Row("train-0", "reverse 4821", "1284")
    right, wrong = await scored(
        ReverseTask(), (row, Answer("1284", (1, 2), "stop")), (row, Answer("128", (1,), "length"))
    )
    assert right == Score({"exact": 1.0}, 1.0, "")
    assert wrong == Score({"exact": 0.0}, 0.0, "")


@pytest.mark.asyncio
async def test_single_turn_is_scored_with_its_weights_and_without_its_file() -> None:
    data = DataSource(train="does-not-exist-where-scores-are-made.jsonl")
    config = SingleTurnTask(type="single-turn", data=data, rewards=[RewardPart(type="exact", weight=0.5)])
    (score,) = await scored(config, (Row("f:1", "2+2?", "4"), Answer("4\n", (1,), "stop")))
    assert score == Score({"exact": 1.0}, 0.5, "")


@pytest.mark.asyncio
async def test_a_task_of_the_working_folder_is_scored_though_a_file_beside_it_is_called_like_a_library(
    user_module: UserModule, tmp_path: Path
) -> None:
    user_module(
        """
class Seeded:
    def __init__(self, seed): self.seed = seed
    def rows(self, split): return [Row("1", "p")]
    def score(self, row, answer): return self.seed + row.info["x"] + len(answer.token_ids) if answer.text else None
"""
    )
    (tmp_path / "json.py").write_text("raise RuntimeError('the wrong json')")
    row = Row("1", [{"role": "user", "content": "p"}], info={"x": 0.5})
    number, none = await scored(
        CustomTask(type="my_task:Seeded"), (row, Answer("a", (1, 2), "stop")), (row, Answer("", (), "stop"))
    )
    assert number == Score({"reward": 9.5}, 9.5, "")
    assert (none.failure, none.parts, math.isnan(none.reward)) == ("verifier_none", {"reward": None}, True)


@pytest.mark.asyncio
async def test_a_task_that_a_verifier_cannot_build_is_named_at_the_start(user_module: UserModule) -> None:
    user_module("import no_such_library")
    with pytest.raises(VerifierError, match=r"importing my_task raised ModuleNotFoundError.*no_such_library"):
        await scored(CustomTask(type="my_task:A"))
