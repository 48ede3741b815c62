"""An SGLang engine that is a client of the double, and what of its answers can be checked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from asyncrl.collectors.engines.base import Completion, Request
from asyncrl.collectors.engines.sglang import SglangEngine
from asyncrl.staleness import Weights

from .sglang_double import SglangDouble, digest_of, serving, token_of
from .tiny_models import make_model, request, staged

LIMIT_S = 60.0
PROMPT = (1, 2, 3, 4, 5)
LLAMA = "llama"


class Ready:
    """An engine, the double it is a client of, and the models it was given, by version."""

    def __init__(self, engine: SglangEngine, double: SglangDouble) -> None:
        self.engine, self.double = engine, double
        self.models: dict[int, PreTrainedModel] = {}

    async def stage(self, version: int, **changes: Any) -> None:
        """A version of its own. The double makes no step meanwhile: what runs, runs afterwards, on any machine."""
        self.models[version] = make_model(LLAMA, seed=version)
        self.double.steps.clear()
        try:
            await self.engine.stage(replace(staged(self.models[version], 1, version), **changes))
        finally:
            self.double.steps.set()

    async def serve(self, version: int, **changes: Any) -> Weights:
        await self.stage(version, **changes)
        return await self.engine.activate("recompute")

    def begin(self, *requests: Request) -> list[asyncio.Task[Completion]]:
        return [asyncio.create_task(self.engine.generate(request)) for request in requests]

    async def until(self, id: str, tokens: int) -> None:
        while self.engine.progress(id) < tokens:  # noqa: ASYNC110 - progress is polled by contract; LIMIT_S bounds it
            await asyncio.sleep(0.001)

    def sampled_by(self, request: Request, completion: Completion) -> list[bool]:
        """Of each token, whether the version it is stamped with sampled it."""
        digests = {version: digest_of(model.named_parameters()) for version, model in self.models.items()}
        return [
            (token, pytest.approx(logprob)) == token_of(request.seed, len(request.token_ids) + place, digests[version])
            for place, (token, logprob, version) in enumerate(
                zip(
                    completion.token_ids.tolist(),
                    completion.logprobs.tolist(),
                    completion.versions.tolist(),
                    strict=True,
                )
            )
        ]


def make_engine(double: SglangDouble, saved: Path, folder: Path) -> SglangEngine:
    return SglangEngine(
        "e0",
        saved,
        url=double.url,
        slots=4,
        max_length=None,
        folder=str(folder),
        api_key_env=None,
        trust_remote_code=False,
    )


@asynccontextmanager
async def connected(saved: Path, folder: Path) -> AsyncIterator[Ready]:
    """Started, and serving nothing yet."""
    async with asyncio.timeout(LIMIT_S), serving(SglangDouble(make_model(LLAMA, seed=99))) as double:
        engine = make_engine(double, saved, folder)
        try:
            await engine.start()
            yield Ready(engine, double)
        finally:
            await engine.close()


@asynccontextmanager
async def ready(saved: Path, folder: Path) -> AsyncIterator[Ready]:
    """Serving version 1."""
    async with connected(saved, folder) as one:
        assert await one.serve(1) == Weights(1, 1) == one.engine.serving
        yield one


def long(id: str, *, seed: int = 0, tokens: int = 400) -> Request:
    return request(id, PROMPT, seed=seed, max_tokens=tokens)
