"""The engine from outside: futures, slots, aborts, activation, and what happens when something breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.collectors.engines.base import EngineError, Request
from asyncrl.collectors.engines.decode import Decoder
from asyncrl.collectors.engines.transformers import TransformersEngine
from asyncrl.staleness import Weights
from asyncrl.weights.base import StagedWeights, WeightsError
from asyncrl.weights.manifest import combined_checksum

from .tiny_models import full_forward, make_model, replay, request, staged

LIMIT_S = 30.0


def make_engine(path: Path, *, slots: int = 4, max_length: int | None = None) -> TransformersEngine:
    return TransformersEngine(
        "e0", path, slots=slots, max_length=max_length, dtype="float32", attn="auto", trust_remote_code=False
    )


@asynccontextmanager
async def serving(path: Path, *, slots: int = 4, max_length: int | None = None) -> AsyncIterator[TransformersEngine]:
    """An engine that serves `make_model(seed=1)` as (1, 1)."""
    engine = make_engine(path, slots=slots, max_length=max_length)
    async with asyncio.timeout(LIMIT_S):
        await engine.start()
        try:
            await engine.stage(staged(make_model(seed=1), 1, 1))
            await engine.activate()
            yield engine
        finally:
            await engine.close()


async def until_progress(engine: TransformersEngine, id: str, tokens: int) -> None:
    while engine.progress(id) < tokens:  # noqa: ASYNC110 - progress is polled by contract; LIMIT_S bounds it
        await asyncio.sleep(0)


def long_request(id: str, *, seed: int = 0) -> Request:
    return request(id, seed=seed, max_tokens=4000)  # seconds of decoding: what happens "meanwhile" does


@pytest.mark.asyncio
async def test_more_requests_than_slots_all_finish_and_slots_are_counted(saved: Path) -> None:
    async with serving(saved, slots=3) as engine:
        assert (engine.slots, engine.free_slots) == (3, 3)
        tasks = [asyncio.create_task(engine.generate(request(f"r{n}", seed=n, max_tokens=1 + n))) for n in range(10)]
        await asyncio.sleep(0)
        assert engine.free_slots == 0
        completions = await asyncio.gather(*tasks)
        assert engine.free_slots == 3
    model = make_model(seed=1)
    for n, completion in enumerate(completions):
        assert len(completion.token_ids) == 1 + n
        assert completion.token_ids.dtype == completion.versions.dtype == np.int32
        assert completion.logprobs.dtype == np.float32
        assert 0 < completion.first_token <= completion.done
        np.testing.assert_allclose(completion.logprobs, full_forward(model, (1, 2, 3, 4, 5), completion), atol=1e-5)
    assert engine.generated_tokens == sum(range(1, 11))


@pytest.mark.asyncio
async def test_nothing_is_generated_before_weights_were_activated(saved: Path) -> None:
    engine = make_engine(saved)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(EngineError, match="serves nothing yet"):
            await engine.generate(request("a"))
        await engine.start()
        assert (engine.serving, engine.checksum) == (None, "")
        with pytest.raises(EngineError, match="serves nothing yet"):
            await engine.generate(request("a"))
        with pytest.raises(WeightsError, match="stage"):
            await engine.activate()
        await engine.close()


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


@pytest.mark.asyncio
async def test_abort_returns_the_partial_of_running_requests_and_nothing_of_queued_ones(saved: Path) -> None:
    async with serving(saved, slots=1) as engine:
        running = asyncio.create_task(engine.generate(long_request("running")))
        await until_progress(engine, "running", 3)
        queued = asyncio.create_task(engine.generate(long_request("queued")))
        await asyncio.sleep(0)
        engine.abort(["running", "queued", "unknown"])
        partial, nothing = await running, await queued
        assert engine.free_slots == 1
        assert len((await engine.generate(request("next"))).token_ids) == 12
    assert partial.finish_reason == nothing.finish_reason == "abort"
    assert 3 <= len(partial.token_ids) == len(partial.logprobs) == len(partial.versions) < 4000
    assert (len(nothing.token_ids), nothing.spans) == (0, ())
    np.testing.assert_allclose(partial.logprobs, full_forward(make_model(seed=1), (1, 2, 3, 4, 5), partial), atol=1e-5)


@pytest.mark.asyncio
async def test_a_cancelled_generate_frees_its_slot(saved: Path) -> None:
    async with serving(saved, slots=1) as engine:
        task = asyncio.create_task(engine.generate(long_request("a")))
        await until_progress(engine, "a", 1)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        before = engine.generated_tokens
        answer = await engine.generate(request("b"))
        assert answer.finish_reason == "length"
        # One step may have been under way when it was cancelled; from then on only `b` was sampled.
        assert engine.generated_tokens - before <= len(answer.token_ids) + 1
        assert engine.free_slots == 1


@pytest.mark.asyncio
async def test_a_decode_thread_that_dies_fails_everyone_with_the_cause_and_can_be_started_again(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(saved, slots=2) as engine:
        tasks = [asyncio.create_task(engine.generate(long_request(f"r{n}"))) for n in range(5)]
        await until_progress(engine, "r0", 2)

        def broken(*_: object) -> None:
            raise RuntimeError("the device fell off the bus")

        monkeypatch.setattr(Decoder, "step", broken)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineError)
            assert "fell off the bus" in str(result)
        with pytest.raises(EngineError, match="fell off the bus"):
            await engine.generate(request("later"))
        with pytest.raises(EngineError, match="fell off the bus"):
            await engine.stage(staged(make_model(seed=2), 1, 2))
        with pytest.raises(EngineError, match="fell off the bus"):
            await engine.activate()
        engine.abort(["r0"])

        monkeypatch.undo()
        await engine.start()
        assert engine.serving is None
        await engine.stage(staged(make_model(seed=1), 1, 1))
        await engine.activate()
        assert (await engine.generate(request("again"))).finish_reason == "length"
        with pytest.raises(EngineError, match="close"):
            await engine.start()


@pytest.mark.asyncio
async def test_an_activation_that_kills_the_thread_does_not_hang_its_caller(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Decoder) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Decoder, "rebuild", broken)
    async with serving(saved) as engine:
        await engine.stage(staged(make_model(seed=2), 1, 2))
        with pytest.raises(EngineError, match="out of memory"):
            await engine.activate("recompute")


@pytest.mark.asyncio
async def test_close_fails_what_still_runs_and_can_be_repeated(saved: Path) -> None:
    async with serving(saved, slots=1) as engine:
        tasks = [asyncio.create_task(engine.generate(long_request(f"r{n}"))) for n in range(2)]
        await until_progress(engine, "r0", 1)
        await engine.close()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineError)
            assert "closed" in str(result)
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request("later"))


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
async def test_an_answer_that_was_begun_goes_on_with_the_same_draws(saved: Path) -> None:
    whole_request = request("whole", seed=5, max_tokens=30)
    async with serving(saved) as engine:
        whole = await engine.generate(whole_request)
        begun = tuple(whole.token_ids[:11].tolist())
        rest = await engine.generate(
            replace(
                whole_request,
                token_ids=(*whole_request.token_ids, *begun),
                sampling=replace(whole_request.sampling, max_tokens=19),
                position=11,
            )
        )
        other = await engine.generate(replace(whole_request, token_ids=(*whole_request.token_ids, *begun)))
    assert rest.token_ids.tolist() == whole.token_ids[11:].tolist()
    np.testing.assert_allclose(rest.logprobs, whole.logprobs[11:], atol=1e-5)
    assert other.token_ids.tolist()[:19] != rest.token_ids.tolist(), "without its position it is drawn otherwise"


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


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"top_p": 0.9}, "top_p 0.9"),
        ({"top_k": 50}, "top_k 50"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": ()}, "prompt of 0 tokens"),
        ({"prompt": (1, 61)}, "vocabulary of 61"),
        ({"prompt": (1, -1)}, "vocabulary of 61"),
        ({"prompt": (1,) * 20}, "1 to 19"),
    ],
)
async def test_requests_that_cannot_be_served_exactly_are_refused(
    saved: Path, change: dict[str, object], reason: str
) -> None:
    async with serving(saved, max_length=20) as engine:
        with pytest.raises(ValueError, match=reason):
            await engine.generate(request("bad", **change))  # type: ignore[arg-type]
        assert engine.free_slots == engine.slots
        completion = await engine.generate(request("good", max_tokens=100))
        assert (len(completion.token_ids), completion.finish_reason) == (15, "length")  # 20 less the prompt's 5


@pytest.mark.asyncio
async def test_an_id_in_use_is_refused(saved: Path) -> None:
    async with serving(saved) as engine:
        task = asyncio.create_task(engine.generate(request("a")))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="unique"):
            await engine.generate(request("a"))
        await task


@pytest.mark.asyncio
async def test_a_folder_without_a_model_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=str(tmp_path)):
        await make_engine(tmp_path).start()
