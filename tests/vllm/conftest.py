"""A vLLM takes half a minute to start: one of either kind serves all tests of a session that leave it alive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from transformers import PreTrainedModel

from asyncrl.collectors.engines.vllm_base import VllmBase
from tests.engines.letters import save_letters

from .models import make_engine, make_model, next_weights, staged
from .server import FOR_ASYNCRL, Server, make_server_engine, serving

START_S = 300.0
"""On a loaded machine; an idle one takes 20 s."""


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as engines load it. Its weights are those of seed 99, which no test serves."""
    path = tmp_path_factory.mktemp("model")
    make_model("qwen3", seed=99).save_pretrained(path)
    save_letters(path)
    return path


@pytest.fixture(scope="session")
def server(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that asyncrl can use, and that these tests leave alive."""
    with serving(saved, tmp_path_factory.mktemp("server") / "log", *FOR_ASYNCRL, limit_s=START_S) as found:
        yield found


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=["own processes", "server"])
async def shared_engine(request: pytest.FixtureRequest, saved: Path) -> AsyncIterator[VllmBase]:
    if request.param == "server":
        engine: VllmBase = make_server_engine(request.getfixturevalue("server").url, saved)
    else:
        engine = make_engine(saved)
    async with asyncio.timeout(START_S):
        await engine.start()
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="session")
async def engine(shared_engine: VllmBase, model: PreTrainedModel) -> VllmBase:
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
