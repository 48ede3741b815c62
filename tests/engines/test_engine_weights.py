"""Weights of the engine: staged, activated under running requests, verified, refused where they do not fit."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.collectors.engines.base import EngineError
from asyncrl.staleness import Weights
from asyncrl.weights.base import StagedWeights, WeightsError
from asyncrl.weights.manifest import combined_checksum

from .serving import long_request, make_engine, serving, until_progress
from .tiny_models import full_forward, make_model, replay, request, staged


@pytest.mark.asyncio
@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_running_requests_survive_an_activation_with_one_span_per_stretch(saved: Path, kv: str) -> None:
    models = {1: make_model(seed=1), 2: make_model(seed=2)}
    async with serving(saved) as engine:
        before = engine.checksum
        task = asyncio.create_task(engine.generate(long_request("a")))
        await until_progress(engine, "a", 5)
        await engine.stage(staged(models[2], 1, 2))
        assert engine.serving == Weights(1, 1)
        assert await engine.activate(kv) == Weights(1, 2) == engine.serving  # type: ignore[arg-type]
        await until_progress(engine, "a", engine.progress("a") + 10)
        engine.abort(["a"])
        completion = await task
        assert engine.checksum == staged(models[2], 1, 2).checksum != before
        assert engine.paused_s > 0
    total = len(completion.token_ids)
    old, new = completion.spans
    assert (old.weights, new.weights) == (Weights(1, 1), Weights(1, 2))
    assert (old.checksum, new.checksum) == (before, engine.checksum)
    assert old.start == 0
    assert 5 <= old.end == new.start
    assert new.end == total
    assert completion.versions.tolist() == [1] * old.end + [2] * (total - old.end)
    prompt = (1, 2, 3, 4, 5)
    if kv == "keep":
        expected = replay(models, prompt, completion)
    else:
        parts = [full_forward(models[v], prompt, completion) for v in (1, 2)]
        expected = torch.cat([parts[0][: old.end], parts[1][old.end :]])
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)


@pytest.mark.asyncio
async def test_a_newer_lineage_may_have_a_lower_version(saved: Path) -> None:
    async with serving(saved) as engine:
        await engine.stage(staged(make_model(seed=2), 1, 8))
        await engine.activate()
        await engine.stage(staged(make_model(seed=3), 2, 5))
        assert await engine.activate() == Weights(2, 5)
        completion = await engine.generate(request("a"))
    assert completion.spans[0].weights == Weights(2, 5)
    np.testing.assert_allclose(
        completion.logprobs, full_forward(make_model(seed=3), (1, 2, 3, 4, 5), completion), atol=1e-5
    )


def missing(good: StagedWeights) -> StagedWeights:
    return replace(good, tensors=dict(list(good.tensors.items())[1:]))


def extra(good: StagedWeights) -> StagedWeights:
    return replace(good, tensors={**good.tensors, "rogue.weight": torch.zeros(2)})


def wrong_shape(good: StagedWeights) -> StagedWeights:
    name = next(iter(good.tensors))
    return replace(good, tensors={**good.tensors, name: good.tensors[name][:-1]})


def wrong_type(good: StagedWeights) -> StagedWeights:
    name = next(iter(good.tensors))
    return replace(good, tensors={**good.tensors, name: good.tensors[name].bfloat16()})


def reordered(good: StagedWeights) -> StagedWeights:
    return replace(good, tensors=dict(reversed(good.tensors.items())))


def untied(good: StagedWeights) -> StagedWeights:
    return replace(good, tied={})


@pytest.mark.asyncio
@pytest.mark.parametrize("spoil", [missing, extra, wrong_shape, wrong_type, reordered, untied])
async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_go_on(saved: Path, spoil: object) -> None:
    async with serving(saved) as engine:
        checksum = engine.checksum
        with pytest.raises(WeightsError, match=r"\(1, 2\)"):
            await engine.stage(spoil(staged(make_model(seed=2), 1, 2)))  # type: ignore[operator]
        with pytest.raises(WeightsError, match="stage"):
            await engine.activate()
        assert (engine.serving, engine.checksum) == (Weights(1, 1), checksum)
        completion = await engine.generate(request("a"))
    np.testing.assert_allclose(
        completion.logprobs, full_forward(make_model(seed=1), (1, 2, 3, 4, 5), completion), atol=1e-5
    )


@pytest.mark.asyncio
async def test_the_checksum_is_computed_from_what_is_served_and_a_wrong_one_is_rolled_back(saved: Path) -> None:
    async with serving(saved) as engine:
        task = asyncio.create_task(engine.generate(long_request("a")))
        await until_progress(engine, "a", 2)
        good = staged(make_model(seed=2), 1, 2)
        await engine.stage(replace(good, checksum="0" * 16))
        with pytest.raises(WeightsError, match=good.checksum):
            await engine.activate()
        assert engine.serving == Weights(1, 1)
        await until_progress(engine, "a", engine.progress("a") + 10)
        engine.abort(["a"])
        completion = await task
        assert engine.checksum == staged(make_model(seed=1), 1, 1).checksum
        await engine.stage(good)
        assert await engine.activate() == Weights(1, 2)
    assert [span.weights for span in completion.spans] == [Weights(1, 1)]
    np.testing.assert_allclose(
        completion.logprobs, full_forward(make_model(seed=1), (1, 2, 3, 4, 5), completion), atol=1e-5
    )


@pytest.mark.asyncio
async def test_what_is_served_can_be_hashed_at_any_time_without_a_pause(saved: Path) -> None:
    engine = make_engine(saved)
    with pytest.raises(EngineError, match="serves nothing"):
        await engine.verify()
    async with serving(saved) as engine:
        task = asyncio.create_task(engine.generate(long_request("a")))
        await until_progress(engine, "a", 2)
        paused = engine.paused_s
        assert await engine.verify() == (Weights(1, 1), engine.checksum)
        assert (engine.paused_s, task.done()) == (paused, False)
        assert engine._live is not None
        weight = next(engine._live.model.parameters())
        weight.view(torch.int32).view(-1)[0] ^= 1  # one bit, in what the engine computes with
        weights, found = await engine.verify()
        assert weights == Weights(1, 1)
        assert found != engine.checksum
        engine.abort(["a"])
        await task


@pytest.mark.asyncio
async def test_weights_without_a_checksum_are_served_and_have_one_when_asked(saved: Path) -> None:
    async with serving(saved) as engine:
        given = staged(make_model(seed=2), 1, 2)
        phases: list[str] = []
        await engine.stage(replace(given, checksum=""))
        await engine.activate(exchanged=lambda: phases.append("verify"))
        assert (engine.serving, engine.checksum, phases) == (Weights(1, 2), "", ["verify"])
        assert await engine.verify() == (Weights(1, 2), given.checksum)
        completion = await engine.generate(request("a"))
    assert [span.checksum for span in completion.spans] == [""]


@pytest.mark.asyncio
async def test_staging_keeps_its_own_copy_and_the_newest_one_wins(saved: Path) -> None:
    async with serving(saved) as engine:
        first, second = staged(make_model(seed=2), 1, 2), staged(make_model(seed=3), 1, 3)
        await engine.stage(first)
        await engine.stage(second)
        for tensor in second.tensors.values():
            tensor.zero_()
        assert await engine.activate() == Weights(1, 3)
        assert engine.checksum == second.checksum != combined_checksum(second.tensors.items())


def test_a_tied_head_follows_its_source() -> None:
    from asyncrl.collectors.engines.live import LiveModel

    live = LiveModel(make_model(seed=99))
    live.stage(staged(make_model(seed=2), 1, 2))
    live.activate()
    expected = make_model(seed=2).lm_head.weight
    assert torch.equal(live.model.lm_head.weight, expected)
    assert torch.equal(live.model.get_input_embeddings().weight, expected)
    assert live.model.lm_head.weight.data_ptr() == live.model.get_input_embeddings().weight.data_ptr()
