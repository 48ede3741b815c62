"""How vLLM ends, or does not: out of memory, and standing still. Each engine is of its own, and is gone afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from transformers import PreTrainedModel

from asyncrl.collectors.engines import vllm
from asyncrl.collectors.engines.base import Completion, EngineError
from asyncrl.collectors.engines.vllm import VllmEngine

from .conftest import START_S
from .models import SLOTS, TOLERANCE, full_forward, make_engine, next_weights, request, staged
from .trees import VLLM, having

PROMPT = (1, 2, 3, 4, 5)
RUNNING = SLOTS - 2


@asynccontextmanager
async def running(
    saved: Path, model: PreTrainedModel
) -> AsyncIterator[tuple[VllmEngine, list[psutil.Process], list[asyncio.Task[Completion]]]]:
    """An engine that serves `model`, its processes, and requests that decode."""
    before = having(os.getpid(), VLLM)
    engine = make_engine(saved)
    async with asyncio.timeout(START_S):
        await engine.start()
    try:
        await engine.stage(staged(model, next_weights(engine)))
        await engine.activate()
        tasks = [
            asyncio.create_task(engine.generate(request(f"r{n}", seed=n, max_tokens=2000))) for n in range(RUNNING)
        ]
        async with asyncio.timeout(60):
            while min(engine.progress(f"r{n}") for n in range(RUNNING)) < 5:  # noqa: ASYNC110 - polled by contract
                await asyncio.sleep(0.005)
        processes = [process for process in having(os.getpid(), VLLM) if process not in before]
        assert len(processes) >= 2
        yield engine, processes, tasks
    finally:
        await engine.close()
    assert [process for process in having(os.getpid(), VLLM) if process not in before] == []


async def all_ended(engine: VllmEngine, model: PreTrainedModel, tasks: list[asyncio.Task[Completion]]) -> set[str]:
    """What is said of the end, once every request has heard of it; what each had is known, to go on elsewhere."""
    async with asyncio.timeout(60):
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for n, outcome in enumerate(outcomes):
        assert isinstance(outcome, EngineError)
        partial = engine.partial(f"r{n}")
        assert partial is not None
        assert len(partial.token_ids) >= 5
        np.testing.assert_allclose(partial.logprobs, full_forward(model, PROMPT, partial), atol=TOLERANCE)
    return set(map(str, outcomes))


@pytest.mark.asyncio
@pytest.mark.timeout(2 * START_S)
async def test_a_vllm_that_is_out_of_memory_ends_all_requests(saved: Path, model: PreTrainedModel) -> None:
    async with running(saved, model) as (engine, processes, tasks):
        for process in processes:
            if process.cmdline()[0].startswith("VLLM::Worker"):
                process.rlimit(psutil.RLIMIT_AS, (1 << 20, 1 << 20))  # it gets no more than it has
        more = [asyncio.create_task(engine.generate(request(f"more{n}", (1,) * 2000, seed=n))) for n in range(2)]
        (said,) = await all_ended(engine, model, tasks)
        assert "does not generate any more: vLLM failed at request" in said
        assert "EngineDeadError" in said
        assert "can't allocate memory" in said
        for task in more:
            with pytest.raises(EngineError, match="EngineDeadError"):
                await task


@pytest.mark.asyncio
@pytest.mark.timeout(2 * START_S)
async def test_a_vllm_that_stands_still_is_ended_with_the_engine(
    saved: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "CLOSE_S", 2.0)
    async with running(saved, model) as (engine, processes, tasks):
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):  # who calls has a limit
            async with asyncio.timeout(2):
                await engine.verify()
        assert not any(task.done() for task in tasks)
        began = time.monotonic()
        async with asyncio.timeout(60):
            await engine.close()
        assert time.monotonic() - began < 60
        (said,) = await all_ended(engine, model, tasks)
        assert "it was closed" in said
