"""Too many answers that no verifier could score end a collector, and with it the run, with examples; few do not."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.collectors.scoring import ENGINE_ERROR, SimulatedScorer
from asyncrl.collectors.unscored import FEWEST, FIX, GROUPS, WINDOW, Missed, TooManyUnscored, UnscoredWatch
from asyncrl.rewards.judge_limits import BudgetSpent
from asyncrl.rewards.scoring import Score


def missed(failure: str = "verifier_raised", row_id: str = "f:1", detail: str = "no", answer: str = "4") -> Missed:
    return Missed(row_id, failure, detail, answer)


def ended_at(seen: Sequence[Missed | None], limit: float | None, group_size: int = 1) -> tuple[int, str]:
    """How many answers were seen when it ended, and the words; (0, "") if it did not."""
    watch = UnscoredWatch(limit, group_size=group_size)
    for n, one in enumerate(seen, 1):
        try:
            watch.see(one)
        except TooManyUnscored as error:
            return n, str(error)
    return 0, ""


def test_it_says_how_many_of_which_class_with_an_example_of_each() -> None:
    seen = [None, missed("verifier_timeout", "a", "late", "x"), missed("judge_unavailable", "b", "down", "")] * 10
    seen += [missed("verifier_raised", f"r{n}", "KeyError: 'a'", f"answer {n}") for n in range(44)]
    at, words = ended_at(seen, 0.5)
    assert at == 64
    assert words.splitlines() == [
        "54 of the last 64 answers could not be scored, more than collector.max_unscored 0.5: "
        "verifier_raised 34, verifier_timeout 10, judge_unavailable 10",
        "  row r33, verifier_raised: KeyError: 'a'; the answer: answer 33",
        "  row a, verifier_timeout: late; the answer: x",
        "  row b, judge_unavailable: down; the answer: (empty)",
        FIX,
    ]


def test_of_one_class_there_are_several_examples() -> None:
    words = ended_at([missed(row_id=f"r{n}") for n in range(64)], 0.5)[1]
    assert [line.split(",")[0] for line in words.splitlines()[1:-1]] == ["  row r63", "  row r62", "  row r61"]


def test_an_example_cannot_steer_a_terminal_or_fill_it() -> None:
    odd = missed(row_id="a\nError: b", detail="\x1b[2J" + "d" * 5000, answer="\x1b]0;title\x07\r\u202e\n" + "x" * 10**6)
    words = ended_at([odd] * 64, 0.5)[1]
    assert len(words.splitlines()) == 3, "the same answer is one example"
    assert all(char.isprintable() or char == "\n" for char in words)
    assert len(words) < 1000


@given(st.lists(st.booleans(), max_size=400), st.floats(0, 0.99), st.integers(1, 40))
def test_it_ends_at_the_first_failure_with_more_than_the_limit_in_the_window(
    failed: list[bool], limit: float, group_size: int
) -> None:
    fewest = max(FEWEST, GROUPS * group_size)
    expected = 0
    for n in range(fewest, len(failed) + 1):
        window = failed[max(0, n - WINDOW * fewest) : n]
        if failed[n - 1] and sum(window) > limit * len(window):
            expected = n
            break
    assert ended_at([missed() if one else None for one in failed], limit, group_size)[0] == expected


def test_old_answers_are_forgotten() -> None:
    good = [None] * 10_000
    assert ended_at([*good, *[missed()] * 128], 0.5)[0] == 0
    assert ended_at([*good, *[missed()] * 129], 0.5)[0] == 10_129


def test_without_a_limit_nothing_ends() -> None:
    assert ended_at([missed()] * 10_000, None) == (0, "")


# --- in a collector -------------------------------------------------------------------------------------------------


async def collected(kit: Any, *, steps: int = 50, **collector: Any) -> tuple[Any, str]:
    """The store's numbers after a collector has ended by itself or `steps` were made, and what it ended with."""
    recipe = kit.recipe(run={"max_steps": 10_000}, collector=collector)
    buffer = kit.buffer(recipe)
    learner = kit.learner(buffer)
    try:
        async with kit.collecting(recipe, buffer) as task:
            await learner.start()
            working = asyncio.ensure_future(_steps(learner, steps))
            try:
                async with asyncio.timeout(kit.limit_s):
                    await asyncio.wait({working, task}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                working.cancel()
    except (TooManyUnscored, BudgetSpent) as error:
        return await buffer.stats(), str(error)
    return await buffer.stats(), ""


async def _steps(learner: Any, steps: int) -> None:
    for _ in range(steps):
        await learner.step()


def scores(failure: str, *, asked: bool, of_ten: int = 7) -> Any:
    """Of ten answers so many have no score."""

    async def score(self, prompt, completion, *, ticket, member):
        if (ticket + 5 * member) % 10 < of_ten:
            return Score({}, math.nan, failure, detail="why", asked=asked)
        return Score({"right": float(member)}, float(member), "", asked=True)

    return score


@pytest.mark.asyncio
async def test_a_collector_whose_verifiers_fail_ends_the_run_for_all(kit, monkeypatch) -> None:
    monkeypatch.setattr(SimulatedScorer, "score", scores("verifier_raised", asked=True))
    stats, words = await collected(kit)
    assert "could not be scored, more than collector.max_unscored 0.5: verifier_raised" in words
    assert "row simulated-" in words
    assert "verifier_raised: why; the answer: (" in words
    assert stats.phase == "ended"
    assert stats.error == f"collector c0: {words}"
    assert stats.members == []


@pytest.mark.asyncio
async def test_with_null_the_same_verifiers_end_nothing(kit, monkeypatch) -> None:
    """The control."""
    monkeypatch.setattr(SimulatedScorer, "score", scores("verifier_raised", asked=True))
    stats, words = await collected(kit, max_unscored=None)
    assert (words, stats.error, stats.version) == ("", None, 50)


@pytest.mark.asyncio
async def test_what_no_verifier_was_asked_about_does_not_count(kit, monkeypatch) -> None:
    monkeypatch.setattr(SimulatedScorer, "score", scores(ENGINE_ERROR, asked=False))
    stats, words = await collected(kit)
    assert (words, stats.error, stats.version) == ("", None, 50)


@pytest.mark.asyncio
async def test_a_spent_budget_ends_the_run_for_all(kit, monkeypatch) -> None:
    left = 20

    async def score(self, prompt, completion, *, ticket, member):
        nonlocal left
        left -= 1
        if left < 0:
            raise BudgetSpent("the budget of the judge 'j' is spent")
        return Score({"right": float(member)}, float(member), "", asked=True)

    monkeypatch.setattr(SimulatedScorer, "score", score)
    stats, words = await collected(kit)
    assert words == "the budget of the judge 'j' is spent"
    assert stats.error == f"collector c0: {words}"
