"""The engine from outside: futures, slots, aborts, refusals, and what happens when something breaks."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asyncrl.collectors.engines.base import EngineError
from asyncrl.collectors.engines.decode import Decoder
from asyncrl.weights.base import WeightsError

from .serving import LIMIT_S, long_request, make_engine, serving, until_progress
from .tiny_models import full_forward, make_model, request, staged


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
    def broken(*_: object) -> None:
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
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.1}, "top_p 1.1"),
        ({"top_p": float("nan")}, "top_p nan"),
        ({"top_k": 0}, "top_k 0"),
        ({"min_p": -0.1}, "min_p -0.1"),
        ({"min_p": 1.1}, "min_p 1.1"),
        ({"min_tokens": -1}, "min_tokens -1"),
        ({"stop": ("a", "")}, "stop strings need the model's tokenizer"),
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
