"""From several verifiers to one score: roles, limits of their own, parts that are asked for elsewhere, classes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.convert import convert
from asyncrl.config.recipe import Collector, CustomTask, SingleTurnTask, Task
from asyncrl.rewards.base import BadRow, Finding, Unscored
from asyncrl.rewards.parts import Verdict, joined, judge
from asyncrl.rewards.pool import VerifierError
from asyncrl.rewards.scoring import Score, Scoring
from asyncrl.tasks.base import Answer, Row
from asyncrl.tasks.verify import scoring_of

MakePool = Callable[..., AbstractAsyncContextManager[Scoring]]
ROW = Row("f:1", "2+2?", "4")


def said(text: str, finish_reason: str = "stop") -> Answer:
    return Answer(text, (1, 2), finish_reason)


def task_of(*rewards: dict[str, Any], **keys: Any) -> Task:
    data = {"train": "no-file-is-read-for-a-score.jsonl"}
    return convert({"task": {"type": "single-turn", "data": data, "rewards": list(rewards), **keys}}).task


async def scored(task: Task, *answers: Answer, row: Row = ROW, score_timeout_s: float = 30.0) -> list[Score]:
    scoring = scoring_of(task, Collector(score_workers=2, score_timeout_s=score_timeout_s), seed=0, max_tokens=20)
    try:
        await asyncio.wait_for(scoring.start(), 60)
        return await asyncio.wait_for(asyncio.gather(*(scoring.score(row, answer) for answer in answers)), 60)
    finally:
        await scoring.close()


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Writes `rewards_of_test.py`, which verifier processes import."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(body: str) -> None:
        (tmp_path / "rewards_of_test.py").write_text("from asyncrl.rewards.base import Finding\n" + body)

    return write


@pytest.mark.asyncio
async def test_a_constraint_is_trained_on_and_in_no_success_and_a_violation_ends_success(
    functions: Callable[[str], None],
) -> None:
    functions("def rude(row, answer): return -1.0 if '!' in answer.text else 0.0")
    task = task_of(
        {"type": "exact", "weight": 2.0},
        {"type": "format", "pattern": r"\s*\d.*", "weight": 0.5},
        {"type": "function", "function": "rewards_of_test:rude", "name": "rude", "role": "violation", "weight": 3.0},
    )
    right, shouted = await scored(task, said("4"), said("4!"))
    assert (right.reward, right.outcome, right.wrong) == (2.5, 2.0, "")
    assert shouted.parts == {"exact": 0.0, "format": 1.0, "rude": -1.0}
    assert (shouted.reward, shouted.outcome, shouted.wrong) == (-2.5, 0.0, "wrong_answer")


@pytest.mark.asyncio
async def test_a_violation_above_0_is_told_and_never_a_reward(functions: Callable[[str], None]) -> None:
    functions("def rude(row, answer): return '!' in answer.text")
    rude = {"type": "function", "function": "rewards_of_test:rude", "name": "rude", "role": "violation"}
    shouted, right = await scored(task_of({"type": "exact"}, rude), said("4!"), said("4"))
    assert (shouted.failure, math.isnan(shouted.reward)) == ("verifier_raised", True)
    assert "returned True, and its role is violation: return a number below 0" in shouted.detail
    assert right.parts == {"exact": 1.0, "rude": 0.0}


@pytest.mark.asyncio
async def test_a_child_that_a_function_forks_and_that_comes_back_answers_nothing(
    functions: Callable[[str], None],
) -> None:
    functions("import os, time\ndef score(row, answer): os.fork() or 1 / 0; time.sleep(0.5); return float(answer.text)")
    task = task_of({"type": "function", "function": "rewards_of_test:score"})
    found = await scored(task, said("1"), said("2"), said("3"))
    assert [(score.failure, score.reward) for score in found] == [("", 1.0), ("", 2.0), ("", 3.0)]


@pytest.mark.asyncio
async def test_the_first_part_of_the_recipe_that_finds_something_wrong_names_the_class(
    functions: Callable[[str], None],
) -> None:
    functions("def tone(row, answer): return Finding({'tone': 0.0}, 'impolite', 'no please')")
    tone = {"type": "function", "function": "rewards_of_test:tone", "name": "tone"}
    (first,) = await scored(task_of(tone, {"type": "exact"}), said("5"))
    (second,) = await scored(task_of({"type": "exact"}, tone), said("5"))
    (only,) = await scored(task_of({"type": "exact"}, tone), said("4"))
    assert (first.wrong, first.detail) == ("impolite", "no please")
    assert (second.wrong, second.detail) == ("wrong_answer", "expected '4'")
    assert only.wrong == "impolite"


@pytest.mark.asyncio
async def test_a_part_with_a_limit_of_its_own_keeps_its_place_in_the_recipe(functions: Callable[[str], None]) -> None:
    functions("def tone(row, answer): return Finding({'tone': 0.0}, 'impolite')")
    tone = {"type": "function", "function": "rewards_of_test:tone", "name": "tone"}
    form = {"type": "format", "pattern": "nothing is like this"}
    (first,) = await scored(task_of({**tone, "timeout_s": 20}, form), said("5"))
    (second,) = await scored(task_of(form, {**tone, "timeout_s": 20}), said("5"))
    assert (first.wrong, second.wrong) == ("impolite", "wrong_format")


@pytest.mark.asyncio
async def test_a_part_with_a_limit_of_its_own_is_killed_by_that_one_and_the_others_keep_theirs(
    functions: Callable[[str], None],
) -> None:
    functions("import time\ndef slow(row, answer): time.sleep(60 if answer.text == 'hang' else 0.3); return 1.0")
    slow = {"type": "function", "function": "rewards_of_test:slow", "name": "slow"}
    limited = task_of({"type": "exact"}, {**slow, "timeout_s": 1.5})
    hanging, fine = await scored(limited, said("hang"), said("4"))
    assert (hanging.failure, hanging.parts) == ("verifier_timeout", {"exact": 0.0})
    assert "part 'slow' took longer than its timeout_s = 1.5 s" in hanging.detail
    assert (fine.parts, fine.reward) == ({"exact": 1.0, "slow": 1.0}, 2.0)
    (control,) = await scored(task_of({"type": "exact"}, slow), said("hang"), score_timeout_s=1.5)
    assert (control.failure, control.parts) == ("verifier_timeout", {}), "without a limit of its own it takes all along"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("body", "failure", "detail"),
    [
        ("def score(row, answer): return None", "verifier_none", "is None"),
        ("def score(row, answer): return float('nan')", "verifier_nan", "NaN"),
        ("def score(row, answer): return [1.0, 2.0]", "verifier_raised", "return one number, or a Finding"),
        ("def score(row, answer): return Finding({'a': 1.0, 'b': 2.0})", "verifier_raised", "makes one number"),
        ("def score(row, answer): return Finding({'a': 1.0}, 'Not A Class')", "verifier_invalid", "wrong_answer"),
        ("def score(row, answer): 1 / 0", "verifier_raised", "ZeroDivisionError"),
    ],
)
async def test_a_function_without_one_number_leaves_the_answer_unscored(
    functions: Callable[[str], None], body: str, failure: str, detail: str
) -> None:
    functions(body)
    (score,) = await scored(task_of({"type": "function", "function": "rewards_of_test:score"}), said("4"))
    assert (score.failure, math.isnan(score.reward)) == (failure, True)
    assert detail in score.detail


@pytest.mark.asyncio
async def test_a_function_that_cannot_be_imported_is_an_error_before_the_first_score() -> None:
    with pytest.raises(VerifierError, match="cannot build the task: ModuleNotFoundError: No module named 'nobodys'"):
        await scored(task_of({"type": "function", "function": "nobodys:score"}), said("4"))


@pytest.mark.asyncio
async def test_a_class_without_a_score_is_judged_by_the_recipes_verifiers(tmp_path: Path, user_rows: str) -> None:
    task = CustomTask(type=user_rows, rewards=list(task_of({"type": "exact"}).rewards))
    right, wrong = await scored(task, said("4"), said("5"))
    assert (right.reward, wrong.reward, wrong.wrong) == (1.0, 0.0, "wrong_answer")


@pytest.fixture
def user_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rows_of_test.py").write_text("class Rows:\n    def rows(self, split): return []\n")
    return "rows_of_test:Rows"


@pytest.mark.asyncio
async def test_a_row_that_nothing_can_be_compared_with_is_unscored_by_its_own_name() -> None:
    (score,) = await scored(task_of({"type": "exact"}), said("4"), row=Row("f:9", "2+2?", None))
    assert (score.failure, math.isnan(score.reward)) == ("bad_row", True)
    assert "f:9" in score.detail


class Asked:
    """A part that is asked for elsewhere."""

    def __init__(self, says: Callable[[Mapping[str, Any]], Finding]) -> None:
        self._says = says
        self.closed = False

    async def start(self) -> None:
        return None

    async def verify(self, row: Mapping[str, Any], answer: Mapping[str, Any]) -> Finding:
        return self._says(answer)

    async def close(self) -> None:
        self.closed = True


def raises(error: Exception) -> Callable[[Mapping[str, Any]], Finding]:
    def says(answer: Mapping[str, Any]) -> Finding:
        raise error

    return says


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("says", "failure"),
    [
        (lambda answer: Finding({"far": len(answer["text"]) / 10}), ""),
        (raises(Unscored("judge_unavailable", "503")), "judge_unavailable"),
        (raises(BadRow("no gold")), "bad_row"),
        (raises(RuntimeError("bug")), "verifier_raised"),
    ],
)
async def test_what_is_asked_elsewhere_is_part_of_the_score_and_its_faults_have_names(
    make_pool: MakePool, says: Callable[[Mapping[str, Any]], Finding], failure: str
) -> None:
    async with make_pool("def score(self, row, answer): return {'near': 1.0}") as near:
        scoring = Scoring(near._pool, timeout_s=30, remotes={"far": Asked(says)}, weights={"far": 2.0})
        score = await asyncio.wait_for(scoring.score(ROW, said("fours")), 30)
    assert score.failure == failure
    assert score.parts["near"] == 1.0, "what is known is kept for the record"
    assert math.isnan(score.reward) if failure else score.reward == 2.0


@pytest.mark.asyncio
async def test_a_remote_part_that_cannot_start_ends_the_start_and_everything_else(make_pool: MakePool) -> None:
    class Down(Asked):
        async def start(self) -> None:
            raise VerifierError("nobody answers at http://judge")

    down = Down(raises(RuntimeError()))
    async with make_pool("def score(self, row, answer): return 1.0") as near:
        scoring = Scoring(near._pool, timeout_s=30, remotes={"far": down})
        with pytest.raises(VerifierError, match="nobody answers"):
            await asyncio.wait_for(scoring.start(), 30)
        with pytest.raises(VerifierError, match="closed"):
            await scoring.score(ROW, said("4"))
    assert down.closed


def test_two_parts_of_one_name_are_refused_and_a_failure_beats_a_class() -> None:
    assert joined([Verdict({"a": 1.0}), Verdict({"a": 0.0})]).failure == "verifier_invalid"
    mixed = joined([Verdict({"a": 0.0}, wrong="wrong_tool"), Verdict({}, "verifier_raised", "boom")])
    assert (mixed.failure, mixed.wrong, mixed.parts) == ("verifier_raised", "", {"a": 0.0})


def test_a_class_is_lower_case_words_and_a_detail_is_short_and_can_be_sent() -> None:
    assert judge(Finding({"a": 0.0}, "wrong_tool", "\ud800" + "x" * 10_000)).detail.encode()
    assert len(judge(Finding({"a": 0.0}, "wrong_tool", "x" * 10_000)).detail) == 500
    assert judge(Finding({"a": 0.0}, "wrong tool")).failure == "verifier_invalid"
    assert judge(Finding({"a": math.inf}, "wrong_tool")).failure == "verifier_invalid"
    assert judge(Finding({"a": True})) == Verdict({"a": 1.0})


def test_the_recipes_part_needs_no_name_of_its_own_and_has_the_one_it_is_given() -> None:
    task = task_of({"type": "exact"}, {"type": "exact", "name": "again", "weight": 0.1})
    assert isinstance(task, SingleTurnTask)
    assert [part.name for part in task.rewards] == [None, "again"]
