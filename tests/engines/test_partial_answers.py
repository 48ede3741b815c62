"""What a request has sampled so far: while it runs, as it grows, and after the engine under it died."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.collectors.engines.base import Completion, EngineError
from asyncrl.collectors.engines.decode import Decoder, Generation
from asyncrl.collectors.engines.parts import continued, joined
from asyncrl.collectors.engines.transformers import TransformersEngine

from .serving import long_request, serving, until_progress
from .tiny_models import full_forward, make_model, request

PROMPT = (1, 2, 3, 4, 5)


def is_whole(part: Completion, *, restricted: bool) -> None:
    """All that comes with a token is there, and no more."""
    count = len(part.token_ids)
    assert len(part.logprobs) == len(part.versions) == count
    assert sum(span.end - span.start for span in part.spans) == count
    assert part.finish_reason in ("abort", "length")
    assert (part.support is not None and len(part.support.counts) == count) if restricted and count else True


@pytest.mark.asyncio
@pytest.mark.parametrize("sampling", [{}, {"top_k": 5}])
async def test_a_running_request_says_what_it_has_sampled_at_any_time(saved: Path, sampling: dict[str, int]) -> None:
    async with serving(saved, slots=1) as engine:
        assert engine.partial("a") is None
        asked = request("a", max_tokens=100, **sampling)
        task = asyncio.create_task(engine.generate(asked))
        parts = []
        while not task.done():
            if (part := engine.partial("a")) is not None:
                is_whole(part, restricted=bool(sampling))
                parts.append(part)
            await asyncio.sleep(0.0005)  # a loop that never rests would starve the decode thread
        whole = await task
        assert engine.partial("a") is None
    lengths = [len(part.token_ids) for part in parts]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 3, "it was seen to grow"
    for part in parts:
        assert part.token_ids.tolist() == whole.token_ids[: len(part.token_ids)].tolist()
        assert part.logprobs.tolist() == whole.logprobs[: len(part.token_ids)].tolist()


@pytest.mark.asyncio
async def test_a_listener_hears_of_new_tokens_until_the_end_and_others_cost_nothing(saved: Path) -> None:
    async with serving(saved, slots=2) as engine:
        heard: list[int] = []
        engine.listen("a", lambda: heard.append(engine.progress("a")))  # its generate has not even begun
        whole, other = await asyncio.gather(
            engine.generate(request("a", max_tokens=200)), engine.generate(request("b", max_tokens=250))
        )
        assert 0 < len(heard) <= 200
        assert heard == sorted(set(heard)), "each time there was something new"
        assert len(whole.token_ids) == 200
        told = len(heard)
        await engine.generate(request("a"))
        assert len(heard) == told, "it ended with the request"
        assert len(other.token_ids) == 250


@pytest.mark.asyncio
async def test_who_reads_along_gets_every_token_in_order(saved: Path) -> None:
    async with serving(saved) as engine:
        news = asyncio.Event()
        engine.listen("a", news.set)
        task = asyncio.create_task(engine.generate(request("a", max_tokens=100)))
        task.add_done_callback(lambda _: news.set())
        read: list[int] = []
        while not task.done():
            await news.wait()
            news.clear()
            if (part := engine.partial("a")) is not None:
                read += part.token_ids[len(read) :].tolist()
        whole = await task
    assert 0 < len(read) <= 100
    assert read == whole.token_ids[: len(read)].tolist()


async def until_it_dies(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> list[BaseException | Completion]:
    """The results of two running requests and one that waits for a slot, whose next step raises `error`."""
    tasks = [asyncio.create_task(engine.generate(long_request(f"r{n}", seed=n))) for n in range(3)]
    await until_progress(engine, "r1", 3)

    def failing(**_: object) -> None:
        raise error

    assert engine._live is not None
    monkeypatch.setattr(engine._live.model, "forward", failing)
    return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.asyncio
async def test_an_engine_out_of_memory_says_so_and_what_ran_goes_on_elsewhere_with_the_same_draws(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(saved, slots=2) as engine, serving(saved, slots=2) as another:
        failed = await until_it_dies(engine, monkeypatch, torch.OutOfMemoryError("tried to allocate 20.00 GiB"))
        for error in failed:
            assert isinstance(error, EngineError)
            assert "OutOfMemoryError: tried to allocate 20.00 GiB" in str(error)
        waiting = engine.partial("r2")
        assert waiting is not None
        assert len(waiting.token_ids) == 0
        for n in range(2):
            asked = replace(long_request(f"r{n}", seed=n), sampling=replace(long_request("").sampling, max_tokens=100))
            part = engine.partial(asked.id)
            assert part is not None
            is_whole(part, restricted=False)
            if len(part.token_ids) >= 100:
                continue  # on a machine that let it run so far before it died
            both = joined([part, await another.generate(continued(asked, part))])
            assert both.token_ids.tolist() == (await another.generate(asked)).token_ids.tolist()
            np.testing.assert_allclose(both.logprobs, full_forward(make_model(seed=1), PROMPT, both), atol=1e-4)
        monkeypatch.undo()
        await engine.start()
        assert engine.partial("r0") is None, "another life"


@pytest.mark.asyncio
async def test_what_was_whole_when_the_engine_died_is_returned(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be continued elsewhere, after its end."""
    sweep = Decoder.sweep

    def failing(self: Decoder) -> list[Generation]:
        if any(generation.finish_reason for generation in self.running):
            raise RuntimeError("the device fell off the bus")
        return sweep(self)

    monkeypatch.setattr(Decoder, "sweep", failing)
    async with serving(saved) as engine:
        short, long = await asyncio.gather(
            engine.generate(request("short", max_tokens=5)),
            engine.generate(long_request("long")),
            return_exceptions=True,
        )
        assert isinstance(short, Completion)
        assert (len(short.token_ids), short.finish_reason) == (5, "length")
        assert isinstance(long, EngineError)
        assert engine.partial("long") is not None
        assert engine.partial("short") is None
