"""A transformers engine that serves a tiny model, and requests that run long enough to do something meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from asyncrl.collectors.engines.base import Request
from asyncrl.collectors.engines.transformers import TransformersEngine

from .tiny_models import make_model, request, staged

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
