"""Recipe to score: the pool's processes build the recipe's task."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.recipe import Collector, CustomTask, DataSource, ReverseTask, SingleTurnTask, Task
from asyncrl.config.rewards import Exact, Format, Length, Overlong
from asyncrl.rewards.pool import VerifierError
from asyncrl.rewards.scoring import Score
from asyncrl.tasks.base import Answer, Row
from asyncrl.tasks.verify import scoring_of

UserModule = Callable[[str], Path]


async def scored(config: Task, *calls: tuple[Row, Answer], timeout_s: float = 30) -> list[Score]:
    pool = scoring_of(config, Collector(score_workers=2, score_timeout_s=timeout_s), seed=7, max_tokens=20)
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
    assert wrong == Score({"exact": 0.0}, 0.0, "", wrong="cut_off")


@pytest.mark.asyncio
async def test_single_turn_is_scored_with_its_weights_and_without_its_file() -> None:
    data = DataSource(train="does-not-exist-where-scores-are-made.jsonl")
    config = SingleTurnTask(type="single-turn", data=data, rewards=[Exact(weight=0.5)])
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


def answer_of(tokens: int, text: str = "1284", finish_reason: str = "stop") -> Answer:
    return Answer(text, tuple(range(tokens)), finish_reason)


@pytest.mark.asyncio
async def test_a_built_in_task_gets_dapos_penalty_and_its_outcome_does_not() -> None:
    """The numbers of verl's issue 4268, where the penalty was left out when rewards came from the rollout."""
    row = Row("train-0", "reverse 4821", "1284")
    config = ReverseTask(rewards=[Overlong(buffer_tokens=4)])
    lengths = (16, 17, 18, 20)
    scores = await scored(config, *((row, answer_of(n)) for n in lengths))
    assert [score.reward for score in scores] == [1.0, 0.75, 0.5, 0.0]
    assert [score.outcome for score in scores] == [1.0] * 4
    assert scores[2] == Score({"exact": 1.0, "overlong": -0.5}, 0.5, "", plain=1.0)


@pytest.mark.asyncio
async def test_a_task_of_ones_own_is_shaped_beside_its_own_parts_and_weights(user_module: UserModule) -> None:
    user_module(
        """
class Own:
    def rows(self, split): return [Row("1", "p")]
    def score(self, row, answer):
        return {"good": 1.0, "length": 3.0} if answer.text == "clash" else float(answer.text) if answer.text else None
    def part_weights(self): return {"reward": 2.0}
"""
    )
    config = CustomTask(
        type="my_task:Own",
        rewards=[Length(target_tokens=4, weight=0.5), Format(pattern=r"\d\.\d")],
        reward_scale=2.0,
        reward_clip=(-1.0, 5.0),
    )
    row = Row("1", "p")
    plain, form, none = await scored(
        config, (row, answer_of(8, "1")), (row, answer_of(4, "9.0")), (row, answer_of(2, ""))
    )
    assert plain == Score(
        {"reward": 1.0, "length": -0.2, "format": 0.0}, 2.0 * (2.0 - 0.1), "", plain=2.0, wrong="wrong_format"
    )
    assert (form.reward, form.outcome, form.parts["format"]) == (5.0, 18.0, 1.0), "clipped after the scale"
    assert (none.failure, math.isnan(none.reward), math.isnan(none.outcome)) == ("verifier_none", True, True)
    (clash,) = await scored(config, (row, answer_of(2, "clash")))
    assert (clash.failure, math.isnan(clash.reward)) == ("verifier_invalid", True)


@pytest.mark.asyncio
async def test_a_pattern_that_takes_for_ever_is_killed_and_the_next_answer_is_scored() -> None:
    row = Row("train-0", "reverse 4821", "1284")
    config = ReverseTask(rewards=[Format(pattern=r"(\d+)+x")])
    stuck, next_one = await scored(config, (row, answer_of(4, "1" * 64)), (row, answer_of(5, "12x")), timeout_s=1.0)
    assert (stuck.failure, math.isnan(stuck.reward)) == ("verifier_timeout", True)
    assert next_one.parts == {"exact": 0.0, "format": 1.0}


@pytest.mark.asyncio
async def test_a_sum_beyond_float32_is_unscored_by_name(user_module: UserModule) -> None:
    user_module(
        """
class Huge:
    def rows(self, split): return [Row("1", "p")]
    def score(self, row, answer): return {"a": 3e38, "b": float(answer.text)}
"""
    )
    row = Row("1", "p")
    fine, beyond = await scored(CustomTask(type="my_task:Huge"), (row, answer_of(1, "1")), (row, answer_of(1, "3e38")))
    assert (fine.failure, beyond.failure, math.isnan(beyond.reward)) == ("", "verifier_invalid", True)


@pytest.mark.asyncio
async def test_a_task_that_a_verifier_cannot_build_is_named_at_the_start(user_module: UserModule) -> None:
    user_module("import no_such_library")
    with pytest.raises(VerifierError, match=r"importing my_task raised ModuleNotFoundError.*no_such_library"):
        await scored(CustomTask(type="my_task:A"))
