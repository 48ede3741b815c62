"""A vLLM engine takes half a minute to start: one serves all tests of a session that leave it alive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from transformers import PreTrainedModel

from asyncrl.collectors.engines.vllm import VllmEngine

from .models import make_engine, make_model, next_weights, staged

START_S = 300.0
"""On a loaded machine; an idle one takes 20 s."""


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as engines load it. Its weights are those of seed 99, which no test serves."""
    path = tmp_path_factory.mktemp("model")
    make_model("qwen3", seed=99).save_pretrained(path)
    return path


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_engine(saved: Path) -> AsyncIterator[VllmEngine]:
    engine = make_engine(saved)
    async with asyncio.timeout(START_S):
        await engine.start()
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="session")
async def engine(shared_engine: VllmEngine, model: PreTrainedModel) -> VllmEngine:
    """It serves `model`."""
    await shared_engine.stage(staged(model, next_weights(shared_engine)))
    await shared_engine.activate()
    return shared_engine


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    return make_model("qwen3", seed=1)


@pytest.fixture(scope="session")
def other() -> PreTrainedModel:
    return make_model("qwen3", seed=2)
