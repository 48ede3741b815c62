"""Evaluations that a collector makes beside training: of the weights that were asked for, and no others."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.collectors.fleet import CollectorError
from asyncrl.collectors.service import Session
from asyncrl.collectors.updates import Updates
from asyncrl.staleness import Weights

pytestmark = pytest.mark.asyncio


async def _evaluate_while_weights_change(kit):
    engine = {"type": "simulated", "slots": 8, "token_s": 0.001, "mean_tokens": 300.0, "cv": 0.0}
    recipe = kit.recipe(collector={"engine": engine})
    buffer = kit.buffer(recipe)
    learner = kit.learner(buffer)
    async with kit.collecting(recipe, buffer) as task:
        await learner.start()
        await buffer.request_evaluation({"id": "eval-1-0", "weights": [1, 0], "prompts": 4, "samples": 3})
        await kit.until(lambda: buffer.model.evaluation_claim == "c0-1", task)
        buffer.model.version = 1
        learner.weights = Weights(1, 1)
        await learner.announce()
        async with asyncio.timeout(kit.limit_s):
            while (result := await buffer.evaluation("eval-1-0", wait_s=0.1)) is None:
                if task.done():
                    task.result()
        await kit.until(lambda: buffer.model.members["c0-1"].serving == Weights(1, 1), task)
        return result


async def test_an_evaluation_holds_the_weights_it_evaluates(kit):
    result = await _evaluate_while_weights_change(kit)
    assert result["weights"] == [1, 0]
    assert (result["n"], result["unscored"]) == (3, 0)  # one held-out row, three samples
    assert result["success"] == sum(answer["reward"] for answer in result["answers"]) / 3
    assert [answer["sample"] for answer in result["answers"]] == [0, 1, 2]
    first = result["answers"][0]
    assert (first["task"], first["version"], first["tokens"]) == ("simulated", 0, 300)
    assert first["latency_s"] >= 0.3  # 300 tokens, a millisecond each
    assert (first["parts"], first["failure"], first["wrong"]) == ({"simulated": first["reward"]}, "", "")
    assert len({answer["seed"] for answer in result["answers"]}) == 3


async def _train_while_an_evaluation_is_open(kit, *, samples):
    """As far as it may: to the age that groups of the weights that are evaluated can be trained at. The evaluation's
    result by then, None while it is still being answered."""
    engine = {"type": "simulated", "slots": 8, "token_s": 0.001, "mean_tokens": 20.0, "cv": 0.0}
    recipe = kit.recipe(collector={"engine": engine, "max_concurrent_groups": 4})
    buffer = kit.buffer(recipe)
    learner = kit.learner(buffer)
    async with kit.collecting(recipe, buffer) as task:
        await learner.start()
        await buffer.request_evaluation({"id": "eval-1-0", "weights": [1, 0], "prompts": 1, "samples": samples})
        await kit.until(lambda: buffer.model.evaluation_claim == "c0-1", task)
        for _ in range(recipe.buffer.max_trajectory_age + 1):
            await learner.step()
        result = await buffer.evaluation("eval-1-0", wait_s=0.0)
        if result is None:
            assert buffer.model.members["c0-1"].serving == Weights(1, 0)
        return result


async def test_the_learner_goes_on_beside_a_long_evaluation(kit):
    assert await _train_while_an_evaluation_is_open(kit, samples=3000) is None


async def test_a_collector_that_rolls_out_after_its_evaluation_would_hold_up_the_learner(kit, monkeypatch):
    """Negative control of the test above."""
    init = Session.__init__

    def one_at_a_time(self, *args, **kwargs):
        init(self, *args, **kwargs)
        start = self.work.start

        async def start_later(ticket):
            if self.evaluation is not None:
                await asyncio.wait({self.evaluation})
            await start(ticket)

        self.work.start = start_later

    monkeypatch.setattr(Session, "__init__", one_at_a_time)
    assert await _train_while_an_evaluation_is_open(kit, samples=800) is not None


async def test_what_the_learner_asks_for_is_sampled_and_measured(kit):
    recipe = kit.recipe()
    buffer = kit.buffer(recipe)
    learner = kit.learner(buffer)
    asked = {"sampling": {"temperature": 0.6, "max_tokens": 9}, "pass_above": 0.5, "difficulty": "level"}
    async with kit.collecting(recipe, buffer):
        await learner.start()
        request = {"id": "eval-1-0", "weights": [1, 0], "prompts": 4, "samples": 3, **asked}
        await buffer.request_evaluation(request)
        async with asyncio.timeout(kit.limit_s):
            while (result := await buffer.evaluation("eval-1-0", wait_s=0.1)) is None:
                pass
    assert (result["sampling"]["temperature"], result["sampling"]["max_tokens"]) == (0.6, 9)
    report = result["report"]
    assert (report["samples"], report["pass_above"], report["prompts"]) == (3, 0.5, 1)
    assert {"reward", "pass@1", "pass@2", "majority@3", "tokens"} <= set(report["metrics"])
    assert list(report["by"]["difficulty"]) == ["unknown"], "these rows have no such column"


async def test_an_evaluation_goes_on_when_one_of_its_engines_is_lost(kit, engines):
    engine = {"type": "simulated", "slots": 4, "token_s": 0.001, "mean_tokens": 300.0, "cv": 0.0}
    recipe = kit.recipe(collector={"engine": engine, "engines": 2})
    buffer = kit.buffer(recipe)
    learner = kit.learner(buffer)
    async with kit.collecting(recipe, buffer) as task:
        await learner.start()
        await buffer.request_evaluation({"id": "eval-1-0", "weights": [1, 0], "prompts": 4, "samples": 3})
        await kit.until(lambda: engines and any(engines[0].progress(f"eval-1-0/0.{n}") > 10 for n in range(3)), task)
        await engines[0].close()
        async with asyncio.timeout(kit.limit_s):
            while (result := await buffer.evaluation("eval-1-0", wait_s=0.1)) is None:
                if task.done():
                    task.result()
    assert (result["n"], result["unscored"]) == (3, 0)
    assert [answer["answer"] for answer in result["answers"]] == ["(300 simulated tokens)"] * 3


async def test_without_the_hold_an_evaluation_would_mix_weights(kit, monkeypatch):
    """Negative control of the test above."""

    class Open:
        async def __aenter__(self):
            return None

        async def __aexit__(self, *error):
            return None

    init = Updates.__init__

    def unheld(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.hold = Open()

    monkeypatch.setattr(Updates, "__init__", unheld)
    with pytest.raises(CollectorError, match=r"an answer has tokens of \[\(1, 1\)\]"):
        await _evaluate_while_weights_change(kit)


async def test_an_evaluation_of_weights_to_come_waits_for_them(kit):
    recipe = kit.recipe()
    buffer = kit.buffer(recipe)
    learner = kit.learner(buffer)
    async with kit.collecting(recipe, buffer):
        await learner.start()
        for _ in range(6):
            await learner.step(announce=False)
            if learner.weights.version == 6:
                await buffer.request_evaluation({"id": "last", "weights": [1, 6], "prompts": 1, "samples": 1})
                assert await buffer.evaluation("last", wait_s=0.05) is None
            await learner.announce()
        result = await buffer.evaluation("last", wait_s=kit.limit_s)
        assert result is not None
        assert result["n"] == 1
