"""What breaks, and what is said then: an engine of its own, which these tests end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Collection
from pathlib import Path

import numpy as np
import psutil
import pytest
from transformers import PreTrainedModel

from asyncrl.collectors.engines.base import EngineError
from asyncrl.collectors.engines.vllm import VllmEngine
from asyncrl.weights.base import WeightsError
from asyncrl.weights.image import DATA_START

from .conftest import START_S
from .models import TOLERANCE, full_forward, make_engine, next_weights, request, staged
from .trees import VLLM, having

PROMPT = (1, 2, 3, 4, 5)


def vllm_processes(others: Collection[psutil.Process] = ()) -> list[psutil.Process]:
    """Those of this process's engines, but for `others`: a session may have another engine."""
    return [process for process in having(os.getpid(), VLLM) if process not in others]


async def start(engine: VllmEngine, model: PreTrainedModel) -> None:
    async with asyncio.timeout(START_S):
        await engine.start()
    await engine.stage(staged(model, next_weights(engine)))
    await engine.activate()


def damage(engine: VllmEngine) -> None:
    """Flip a bit of the staged image, in the middle of what its last matrix says."""
    assert engine._staged is not None
    _, offer = engine._staged
    spec = next(spec for spec in offer["manifest"]["tensors"] if spec["name"].endswith("layers.1.mlp.down_proj.weight"))
    fd = os.open(offer["path"], os.O_RDWR)
    at = DATA_START + spec["offset"] + spec["nbytes"] // 2
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1]), at)
    os.close(fd)


@pytest.mark.asyncio
@pytest.mark.timeout(3 * START_S)
async def test_an_engine_says_what_is_wrong_serves_nothing_damaged_and_starts_again(
    saved: Path, model: PreTrainedModel, other: PreTrainedModel
) -> None:
    others = vllm_processes()
    engine = make_engine(saved)
    with pytest.raises(EngineError, match="not started"):
        await engine.stage(staged(model, next_weights(engine)))
    with pytest.raises(EngineError, match="serves nothing yet"):
        await engine.generate(request("a"))
    try:
        async with asyncio.timeout(START_S):
            await engine.start()
        assert (engine.serving, engine.checksum, engine.free_slots) == (None, "", engine.slots)
        with pytest.raises(EngineError, match="serves nothing yet"):
            await engine.generate(request("a"))
        with pytest.raises(WeightsError, match="stage"):
            await engine.activate()
        with pytest.raises(EngineError, match="serves nothing"):
            await engine.verify()
        with pytest.raises(EngineError, match="close"):
            await engine.start()

        await engine.stage(staged(model, next_weights(engine)))
        await engine.activate()
        running = asyncio.create_task(engine.generate(request("a", max_tokens=1500)))
        await engine.stage(staged(other, next_weights(engine)))
        damage(engine)
        with pytest.raises(EngineError, match="was published"):
            await engine.activate()
        assert engine.checksum == staged(model, next_weights(engine)).checksum  # nothing was said to be served
        with pytest.raises(EngineError, match="was published"):
            await running
        with pytest.raises(EngineError, match="was published"):
            await engine.generate(request("b"))
        await engine.close()
        await engine.close()
        assert vllm_processes(others) == []

        await start(engine, other)
        completion = await engine.generate(request("c"))
        np.testing.assert_allclose(completion.logprobs, full_forward(other, PROMPT, completion), atol=TOLERANCE)

        tasks = [asyncio.create_task(engine.generate(request(f"r{n}", max_tokens=1500))) for n in range(6)]
        async with asyncio.timeout(30):
            while engine.progress("r0") < 2:  # noqa: ASYNC110 - progress is polled by contract
                await asyncio.sleep(0.005)
        for process in vllm_processes(others):
            os.kill(process.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(outcome, EngineError)
        with pytest.raises(EngineError, match="does not generate any more"):
            await engine.generate(request("later"))
        with pytest.raises(EngineError, match="does not generate any more"):
            await engine.stage(staged(model, next_weights(engine)))
    finally:
        await engine.close()
    assert vllm_processes(others) == []


@pytest.mark.asyncio
async def test_what_vllm_cannot_start_with_is_said(saved: Path) -> None:
    engine = VllmEngine(
        "e0",
        saved,
        slots=1,
        max_length=1 << 20,
        dtype="float32",
        trust_remote_code=False,
        gpu_memory_utilization=0.9,
        kv_cache_memory_bytes=None,
        enforce_eager=None,
        extra={},
    )
    with pytest.raises(EngineError, match="max_model_len"):
        await engine.start()
    engine = VllmEngine(
        "e0",
        saved,
        slots=1,
        max_length=None,
        dtype="float32",
        trust_remote_code=False,
        gpu_memory_utilization=0.9,
        kv_cache_memory_bytes=None,
        enforce_eager=None,
        extra={"no_such_argument": 1},
    )
    with pytest.raises(EngineError, match="no_such_argument"):
        await engine.start()
