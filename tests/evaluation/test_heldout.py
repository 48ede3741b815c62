"""An evaluation beside work that must go on: the loop is shared with heartbeats and signals."""

from __future__ import annotations

import asyncio
import json
import math
from itertools import count
from typing import Any

import numpy as np
import pytest

from asyncrl.collectors.engines.base import Completion, Request, Sampling, request_seed
from asyncrl.collectors.evaluation.heldout import Evaluation, evaluate, wrong_of
from asyncrl.collectors.rollout import Prompt, PromptError, SimulatedPrompts
from asyncrl.collectors.single import SinglePlayer
from asyncrl.rewards.scoring import Score
from asyncrl.staleness import Weights

ROWS = 50


class Unpresentable:
    """Prompts of which none can be rendered; what each try saw of `beats`."""

    heldout_rows = ROWS

    def __init__(self) -> None:
        self.beats = 0
        self.seen: list[int] = []

    def heldout(self, index: int) -> Prompt:
        self.seen.append(self.beats)
        raise PromptError("row_error", f"row {index} is broken", task="unpresentable")


class Never:
    async def generate(self, request: Request) -> Completion:
        raise AssertionError(f"{request.id} was generated")


@pytest.mark.asyncio
async def test_rows_are_rendered_once_and_others_go_on_between_them() -> None:
    prompts: Any = Unpresentable()

    async def beat() -> None:
        for prompts.beats in count(1):
            await asyncio.sleep(0)

    beating = asyncio.create_task(beat())
    try:
        result = await evaluate(
            Evaluation("e", Weights(1, 0), ROWS, samples=4),
            prompts=prompts,
            player=SinglePlayer(Any),  # nothing to score
            sampler=Never(),  # type: ignore[arg-type]  # asked by nobody
            sampling=Sampling(max_tokens=1),
            run="run/0",
            at_once=8,
        )
    finally:
        beating.cancel()
    assert len(prompts.seen) == ROWS
    assert prompts.seen == sorted(set(prompts.seen)), "some were rendered without a beat in between"
    assert (result["n"], result["unscored"], result["success"]) == (4 * ROWS, 4 * ROWS, None)
    assert [answer["failure"] for answer in result["answers"]] == ["row_error"] * 4 * ROWS


class Shaped:
    """Scores of an answer that is right and too long."""

    async def score(self, prompt: Prompt, completion: Completion, *, ticket: int, member: int) -> Score:
        return Score({"exact": 1.0, "overlong": -1.0}, 0.0, "", plain=1.0)


class Plain(Shaped):
    """The same, had nobody told the outcome from the reward."""

    async def score(self, prompt: Prompt, completion: Completion, *, ticket: int, member: int) -> Score:
        return Score({"exact": 1.0, "overlong": -1.0}, 0.0, "")


class OneToken:
    async def generate(self, request: Request) -> Completion:
        none = np.zeros(1, np.int32)
        return Completion(none, np.zeros(1, np.float32), none, spans=(), finish_reason="length")


@pytest.mark.asyncio
async def test_success_is_what_the_task_says_and_not_what_is_trained_on() -> None:
    """Control: the shaped reward would call the same answers a failure."""
    found = []
    for scorer in (Shaped(), Plain()):
        result = await evaluate(
            Evaluation("e", Weights(1, 0), prompts=1, samples=2),
            prompts=SimulatedPrompts(),
            player=SinglePlayer(scorer),  # type: ignore[arg-type]  # starts and closes nothing
            sampler=OneToken(),  # type: ignore[arg-type]  # nobody listens
            sampling=Sampling(max_tokens=1),
            run="run/0",
            at_once=8,
        )
        found.append((result["success"], [answer["reward"] for answer in result["answers"]]))
    assert found == [(1.0, [1.0, 1.0]), (0.0, [0.0, 0.0])]


class Wrong(Shaped):
    """An answer that is scored and wrong, and one that nobody could score."""

    async def score(self, prompt: Prompt, completion: Completion, *, ticket: int, member: int) -> Score:
        if member:
            return Score({"exact": None}, math.nan, "verifier_nan", detail="part 'exact' is NaN", seconds=math.inf)
        return Score({"exact": 0.0}, 0.0, "", wrong="wrong_answer", read="12", detail="expected '321'", seconds=0.5)


@pytest.mark.asyncio
async def test_what_is_wrong_and_why_something_is_unscored_are_kept_apart() -> None:
    result = await evaluate(
        Evaluation("e", Weights(1, 7), prompts=1, samples=2, split="train"),
        prompts=SimulatedPrompts(),
        player=SinglePlayer(Wrong()),  # type: ignore[arg-type]  # starts and closes nothing
        sampler=OneToken(),  # type: ignore[arg-type]  # nobody listens
        sampling=Sampling(max_tokens=1),
        run="run/0",
        at_once=8,
    )
    wrong, unscored = result["answers"]
    assert (wrong["reward"], wrong["failure"], wrong["wrong"]) == (0.0, "", "wrong_answer")
    assert (wrong["detail"], wrong["verifier_s"], wrong["version"]) == ("expected '321'", 0.5, 7)
    assert (unscored["reward"], unscored["failure"], unscored["wrong"]) == (None, "verifier_nan", "")
    assert (wrong["read"], unscored["read"]) == ("12", "")
    assert (unscored["parts"], unscored["verifier_s"]) == ({"exact": None}, None)
    json.dumps(result, allow_nan=False)
    assert wrong["row_id"] == "simulated-0", "a train row"
    assert wrong["latency_s"] >= 0
    assert [answer["seed"] for answer in result["answers"]] == [
        request_seed("run/0/train", 0, 0, member, 0) for member in (0, 1)
    ]


class Counting(OneToken):
    """How many answers were asked for at once, at most."""

    def __init__(self) -> None:
        self.running = self.most = self.asked = 0
        self.all_asked = asyncio.Event()  # of eight

    async def generate(self, request: Request) -> Completion:
        self.running += 1
        self.asked += 1
        if self.asked == 8:
            self.all_asked.set()
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        return await super().generate(request)


@pytest.mark.asyncio
@pytest.mark.parametrize(("at_once", "most"), [(3, 3), (100, 8)])
async def test_no_more_answers_are_asked_for_at_once_than_may_be(at_once: int, most: int) -> None:
    sampler = Counting()
    await evaluate(
        Evaluation("e", Weights(1, 0), prompts=1, samples=8),
        prompts=SimulatedPrompts(),
        player=SinglePlayer(Plain()),  # type: ignore[arg-type]  # starts and closes nothing
        sampler=sampler,  # type: ignore[arg-type]  # nobody listens
        sampling=Sampling(max_tokens=1),
        run="run/0",
        at_once=at_once,
    )
    assert sampler.most == most


class Slow(Plain):
    """A score that comes once all answers were sampled."""

    def __init__(self, sampler: Counting) -> None:
        self.sampler = sampler

    async def score(self, prompt: Prompt, completion: Completion, *, ticket: int, member: int) -> Score:
        async with asyncio.timeout(30):
            await self.sampler.all_asked.wait()
        return await super().score(prompt, completion, ticket=ticket, member=member)


@pytest.mark.asyncio
async def test_while_answers_are_scored_others_are_sampled() -> None:
    """Whoever holds a place until the score is there would wait for ever."""
    sampler = Counting()
    result = await evaluate(
        Evaluation("e", Weights(1, 0), prompts=1, samples=8),
        prompts=SimulatedPrompts(),
        player=SinglePlayer(Slow(sampler)),  # type: ignore[arg-type]  # starts and closes nothing
        sampler=sampler,  # type: ignore[arg-type]  # nobody listens
        sampling=Sampling(max_tokens=1),
        run="run/0",
        at_once=1,
    )
    assert (result["n"], result["unscored"], sampler.most) == (8, 0, 1)


def test_older_documents_kept_the_class_of_what_is_wrong_under_failure() -> None:
    old = {"reward": 0.0, "failure": "wrong_answer"}
    assert [wrong_of(old), wrong_of({"reward": None, "failure": "verifier_nan"})] == ["wrong_answer", ""]
    assert wrong_of({"reward": 0.0, "failure": "", "wrong": "cut_off"}) == "cut_off"
