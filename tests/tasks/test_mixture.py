"""Several tasks in one run: rows, order, scores, each task as it would be alone."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.collectors.single import SinglePlayer, nothing_sampled
from asyncrl.config.convert import convert
from asyncrl.config.derived import derive
from asyncrl.config.recipe import Collector, MixtureTask, Recipe, mixed_tasks
from asyncrl.rewards.pool import VerifierError
from asyncrl.rewards.scoring import Score
from asyncrl.tasks.base import Answer, Row, TaskError
from asyncrl.tasks.build import build_task
from asyncrl.tasks.conversing import check_turns, converses
from asyncrl.tasks.mixture import Mixture, task_of
from asyncrl.tasks.training import train_rows
from asyncrl.tasks.verify import scorings_of

UserModule = Callable[[str], Path]

OWN = """
class Own:
    def __init__(self, rows=5): self.count = rows
    def rows(self, split): return [Row(f"{split}/{n}", f"ask {n}", str(n)) for n in range(self.count)]
    def messages(self, row): return [{"role": "user", "content": f"{row.id}: {row.prompt}"}]
    def score(self, row, answer):
        assert row.id.startswith(("train/", "heldout/")), row.id
        return {"reward": float(answer.text == row.answer), "form": 1.0}
    def part_weights(self): return {"reward": 2.0, "form": 0.25}
"""

ADDS = '''
def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: Another.
    """
    return a + b

class Adds:
    tools = [add]
    def rows(self, split): return [Row("1", "1+2", "3")]
    def score(self, row, answer): return float(answer.text == row.answer)
'''


def mixture(*tasks: dict[str, Any]) -> tuple[MixtureTask, Mixture]:
    config = convert({"task": {"type": "mixture", "tasks": list(tasks)}}).task
    task = build_task(config, seed=3)
    assert isinstance(config, MixtureTask)
    assert isinstance(task, Mixture)
    return config, task


BUILT_IN = mixture(
    {"name": "a", "weight": 0.3, "task": {"type": "reverse"}},
    {"name": "b", "weight": 0.9, "task": {"type": "uppercase"}},
)


def two(**more: Any) -> tuple[MixtureTask, Mixture]:
    return mixture(
        {"name": "short", "weight": 2, "task": {"type": "reverse", "digits": [1, 1]}},
        {"name": "own", "task": {"type": "my_task:Own", **more}},
    )


def test_a_rows_id_and_task_are_those_of_its_own_task(user_module: UserModule) -> None:
    user_module(OWN)
    _, task = two()
    rows = task.rows("heldout")
    assert [rows[n].id for n in range(4)] == ["short/heldout-0", "own/heldout/0", "own/heldout/1", "own/heldout/2"]
    assert len(rows) == 1 + 5, "one string of one digit is held out"
    assert task.messages(rows[1]) == [{"role": "user", "content": "heldout/0: ask 0"}], "it sees its own id"
    assert task.part_weights() == {"short/exact": 1.0, "own/reward": 2.0, "own/form": 0.25}


def test_each_task_shows_every_row_once_in_each_of_its_own_epochs(user_module: UserModule) -> None:
    user_module(OWN)
    config, task = two()
    row_of = train_rows(task, config, seed=3)
    drawn = [row_of(ordinal).id for ordinal in range(3 * 45)]
    by_task = {name: [i for i in drawn if i.startswith(f"{name}/")] for name in ("short", "own")}
    assert (len(by_task["short"]), len(by_task["own"])) == (90, 45), "as 2 to 1"
    for name, epoch in (("short", 9), ("own", 5)):
        for start in range(0, len(by_task[name]), epoch):
            assert set(Counter(by_task[name][start : start + epoch]).values()) == {1}
        first, second = by_task[name][:epoch], by_task[name][epoch : 2 * epoch]
        assert first != second, "each epoch has an order of its own"


@settings(max_examples=20)
@given(ordinals=st.lists(st.integers(0, 2**40), max_size=20), seed=st.integers(0, 9))
def test_the_row_of_an_ordinal_depends_on_nothing_that_was_asked_before(ordinals: list[int], seed: int) -> None:
    one, other = (train_rows(task, config, seed=seed) for config, task in (BUILT_IN, BUILT_IN))
    found = {ordinal: one(ordinal).id for ordinal in ordinals}
    assert {ordinal: other(ordinal).id for ordinal in sorted(ordinals, reverse=True)} == found


def test_a_task_of_one_row_stands_beside_one_of_billions(user_module: UserModule) -> None:
    user_module(OWN)
    config, task = mixture(
        {"name": "many", "weight": 1e9, "task": {"type": "reverse", "digits": [9, 9]}},
        {"name": "one", "weight": 1e8, "task": {"type": "my_task:Own", "args": {"rows": 1}}},
    )
    row_of = train_rows(task, config, seed=0)
    drawn = [row_of(ordinal).id for ordinal in range(10**12, 10**12 + 110)]
    assert drawn.count("one/train/0") == 10
    assert len(set(drawn)) == 100 + 1, "the one is asked again, the others are not"
    rows = task.rows("heldout")
    assert [rows[n].id.partition("/")[0] for n in range(4)] == ["many", "one", "many", "many"]


def test_a_task_of_a_mixture_has_the_order_that_it_has_alone() -> None:
    config, task = mixture({"name": "a", "task": {"type": "uppercase"}}, {"name": "b", "task": {"type": "reverse"}})
    alone = train_rows(task.tasks["a"], mixed_tasks(config)["a"], seed=3)
    row_of = train_rows(task, config, seed=3)
    drawn = [row_of(n).id for n in range(60)]
    assert [i.removeprefix("a/") for i in drawn if i.startswith("a/")] == [alone(n).id for n in range(30)]


async def scored(config: MixtureTask, *calls: tuple[Row, Answer]) -> list[Score]:
    scorings = scorings_of(config, Collector(score_workers=2, score_timeout_s=30), seed=7, max_tokens=20)
    try:
        for scoring in scorings.values():
            await asyncio.wait_for(scoring.start(), 60)
        scores = (scorings[task_of(row.id)].score(row, answer) for row, answer in calls)
        return await asyncio.wait_for(asyncio.gather(*scores), 60)
    finally:
        await asyncio.gather(*(scoring.close() for scoring in scorings.values()))


@pytest.mark.asyncio
async def test_each_answer_is_scored_by_the_parts_weights_and_rule_of_its_own_task(user_module: UserModule) -> None:
    """Other parts than the first answer's make an answer unscored, but not where its task is another."""
    user_module(OWN)
    config, task = two(reward_scale=2.0, rewards=[{"type": "length", "target_tokens": 4, "weight": 0.5}])
    short, own = task.rows("heldout")[0], task.rows("heldout")[1]
    right = Answer(str(short.answer), (1, 2), "stop")
    one, other, again = await scored(config, (short, right), (own, Answer("0", (1, 2), "stop")), (short, right))
    assert one == again == Score({"exact": 1.0}, 1.0, "")
    assert other.parts == {"reward": 1.0, "form": 1.0, "length": -0.1}
    assert (other.reward, other.outcome) == (pytest.approx(2.0 * (2.0 + 0.25 - 0.05)), 2.25)


@pytest.mark.asyncio
async def test_a_part_with_a_limit_of_its_own_is_asked_of_its_own_tasks_answers_only(user_module: UserModule) -> None:
    user_module(OWN)
    config, task = two(rewards=[{"type": "format", "pattern": r"(\d+)+x", "timeout_s": 1.0}])
    stuck = Answer("1" * 64, (1,), "stop")
    one, other = await scored(config, (task.rows("heldout")[0], stuck), (task.rows("heldout")[1], stuck))
    assert (one.parts, one.failure) == ({"exact": 0.0}, "")
    assert other.failure == "verifier_timeout"


@pytest.mark.asyncio
async def test_a_task_that_a_verifier_cannot_build_ends_the_start_of_all(
    user_module: UserModule, tmp_path: Path
) -> None:
    user_module(OWN)
    config, task = two()
    (tmp_path / "my_task.py").write_text("import no_such_library")
    with pytest.raises(VerifierError, match="no_such_library"):
        await scored(config, (task.rows("heldout")[0], Answer("", (), "stop")))


def test_a_task_of_several_turns_is_looked_at_in_a_mixture_as_alone(user_module: UserModule) -> None:
    user_module(ADDS)
    _, task = mixture({"task": {"type": "reverse"}}, {"name": "play", "task": {"type": "my_task:Adds"}})
    assert converses(task)
    check_turns(task, max_turns=2)
    with pytest.raises(TaskError, match=r"my_task:Adds has tools, but collector\.max_turns is 1"):
        check_turns(task, max_turns=1)
    assert not converses(BUILT_IN[1])


def test_a_bad_row_of_one_task_is_named(user_module: UserModule) -> None:
    user_module("class Empty:\n    def rows(self, split): return []\n    def score(self, row, answer): return 1.0\n")
    with pytest.raises(TaskError, match=r"my_task:Empty: rows\('train'\) is empty"):
        mixture({"task": {"type": "reverse"}}, {"task": {"type": "my_task:Empty"}})


def test_gdpo_weighs_each_answers_parts_as_its_own_task_does() -> None:
    """The part `form` weighs 1 in one task and 3 in the other. Control: under one weight for both, the parts of some
    answers would not add up to their reward, which is refused."""
    from asyncrl.learners.advantages import _gdpo

    def part(weight: float) -> list[dict[str, Any]]:
        return [{"type": "format", "name": "form", "pattern": "a", "weight": weight}]

    recipe: Recipe = convert(
        {
            "task": {
                "type": "mixture",
                "tasks": [
                    {"name": "a", "task": {"type": "reverse", "rewards": part(1.0)}},
                    {"name": "b", "task": {"type": "uppercase", "rewards": part(3.0), "reward_scale": 2.0}},
                ],
            }
        }
    )
    a, b = mixed_tasks(recipe.task).values()
    told = [[("exact", 1.0), ("form", 0.0)], [("exact", 0.0), ("form", 1.0)]] * 2
    rewards, groups = np.array([1.0, 1.0, 2.0, 6.0]), np.array([0, 0, 1, 1])
    found = _gdpo(rewards, groups, told, [a, a, b, b])
    unit = 1 / np.sqrt(2)  # (1 - 0.5) / spread over n - 1, but for the 1e-4
    assert found.values == pytest.approx([0.0, 0.0, unit - 3 * unit, 3 * unit - unit], abs=1e-3)
    with pytest.raises(ValueError, match="do not add up"):
        _gdpo(rewards, groups, told, [a, a, a, a])
    alone = _gdpo(
        np.array([1.0, 0.0, 2.0, np.nan]), groups, [[("exact", 1.0)], [("exact", 0.0)], told[2], []], [a, a, b, b]
    )
    assert alone.values[:2] == pytest.approx([unit, -unit], abs=1e-3), "a part that the other task has is none of its"


def test_room_is_kept_for_episodes_of_several_turns_if_any_task_has_them() -> None:
    """Else a group of the one that has would be refused by the store."""

    def held(*types: str) -> int:
        tasks = [{"name": f"t{n}", "task": {"type": kind}} for n, kind in enumerate(types)]
        recipe = convert({"task": {"type": "mixture", "tasks": tasks}, "collector": {"max_turns": 5}})
        return derive(recipe).group_bytes

    alone = derive(convert({"task": {"type": "my_task:Own"}, "collector": {"max_turns": 5}})).group_bytes
    assert held("reverse", "my_task:Own") == alone > held("reverse", "uppercase")


@pytest.mark.asyncio
async def test_a_simulated_engine_has_the_mix_and_rewards_that_gdpo_takes() -> None:
    from asyncrl.collectors.playing import task_parts
    from asyncrl.learners.advantages import _gdpo, _task_of

    tasks = [
        {"name": "a", "weight": 2, "task": {"type": "reverse"}},
        {"name": "b", "task": {"type": "uppercase", "reward_scale": 3.0}},
    ]
    recipe = convert({"task": {"type": "mixture", "tasks": tasks}, "collector": {"engine": {"type": "simulated"}}})
    prompts, player = task_parts(recipe, None)
    row_of = train_rows(build_task(recipe.task, seed=0), recipe.task, seed=0)
    asked = [prompts.train(ordinal) for ordinal in range(12)]
    assert [prompt.task for prompt in asked] == [task_of(row_of(ordinal).id) for ordinal in range(12)]
    assert [prompts.heldout(index).task for index in range(prompts.heldout_rows)] == ["a", "b"]

    assert isinstance(player, SinglePlayer)
    members = [(ordinal, member) for ordinal in range(12) for member in range(4)]
    answer = nothing_sampled("")
    scores = [await player._scorer.score(asked[n], answer, ticket=n, member=m) for n, m in members]
    assert {score.reward for score in scores} == {0.0, 1.0, 3.0}
    assert {score.outcome for score in scores} == {0.0, 1.0}
    found = _gdpo(
        np.array([score.reward for score in scores]),
        np.array([ordinal for ordinal, _ in members]),
        [list(score.parts.items()) for score in scores],
        [_task_of(recipe.task, asked[n].task) for n, _ in members],
    )
    assert found.values.any()


def test_a_mixture_is_kept_and_read_back_as_it_is() -> None:
    from asyncrl.config.recipe import to_builtins

    config, _ = mixture({"task": {"type": "reverse"}}, {"weight": 0.5, "task": {"type": "uppercase"}})
    assert convert({"task": json.loads(json.dumps(to_builtins(config)))}).task == config
    assert list(mixed_tasks(config)) == ["reverse", "uppercase"]
