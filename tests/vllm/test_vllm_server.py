"""A server has other users than a process of one's own: what it lacks, what another one did to it, and its end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import numpy as np
import pytest
from transformers import PreTrainedModel

from asyncrl.collectors.engines import vllm_server
from asyncrl.collectors.engines.base import EngineError
from asyncrl.collectors.engines.vllm_server import VllmServerEngine
from asyncrl.staleness import Weights

from .conftest import START_S
from .models import TOLERANCE, full_forward, make_model, request, staged
from .server import FOR_ASYNCRL, Server, make_server_engine, serving

PROMPT = (1, 2, 3, 4, 5)


async def serve(engine: VllmServerEngine, model: PreTrainedModel, version: int) -> None:
    await engine.stage(staged(model, Weights(1, version)))
    await engine.activate()


async def generates_exactly(engine: VllmServerEngine, model: PreTrainedModel) -> None:
    completion = await engine.generate(request("a"))
    np.testing.assert_allclose(completion.logprobs, full_forward(model, PROMPT, completion), atol=TOLERANCE)


async def until_progress(engine: VllmServerEngine, id: str, tokens: int) -> None:
    async with asyncio.timeout(60):
        while engine.progress(id) < tokens:  # noqa: ASYNC110 - progress is polled by contract
            await asyncio.sleep(0.005)


async def post(server: Server, path: str, body: dict[str, object] | None = None) -> None:
    async with httpx2.AsyncClient(timeout=60) as http:
        (await http.post(f"{server.url}{path}", json=body)).raise_for_status()


@pytest.mark.asyncio
@pytest.mark.timeout(2 * START_S)
async def test_a_server_that_cannot_do_what_is_needed_is_refused_with_what_to_start_it_with(
    server: Server, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineError, match=r"--dtype bfloat16; .*--max-num-seqs 64, or set .*slots to 4"):
        await make_server_engine(server.url, saved, slots=64, dtype="bfloat16").start()
    with pytest.raises(EngineError, match=r"wants an API key.*collector\.engine\.api_key_env"):
        await make_server_engine(server.url, saved, key="HOME").start()
    monkeypatch.setattr(vllm_server, "READY_S", 0.0)
    with pytest.raises(EngineError, match=r"no vLLM server is ready at http://127\.0\.0\.1:9 "):
        await make_server_engine("http://127.0.0.1:9", saved).start()


@pytest.mark.parametrize(
    ("dev_mode", "arguments", "message"),
    [
        (False, (), "start it with VLLM_SERVER_DEV_MODE=1"),
        (True, (), "does not know asyncrl: start it.* with --worker-extension-cls asyncrl"),
    ],
)
@pytest.mark.asyncio
@pytest.mark.timeout(2 * START_S)
async def test_a_server_that_was_not_started_for_asyncrl_is_refused(
    saved: Path, tmp_path: Path, dev_mode: bool, arguments: tuple[str, ...], message: str
) -> None:
    arguments = ("--skip-tokenizer-init", *arguments)
    with serving(saved, tmp_path / "log", *arguments, dev_mode=dev_mode, limit_s=START_S) as plain:
        engine = make_server_engine(plain.url, saved)
        with pytest.raises(EngineError, match=message):
            await engine.start()


@pytest.mark.asyncio
@pytest.mark.timeout(3 * START_S)
async def test_what_others_do_to_a_server_is_said_and_who_comes_next_begins_from_its_own_weights(
    saved: Path, tmp_path: Path, model: PreTrainedModel, other: PreTrainedModel
) -> None:
    with serving(saved, tmp_path / "log", *FOR_ASYNCRL, limit_s=START_S) as server:
        engine = make_server_engine(server.url, saved)
        await engine.start()
        await serve(engine, model, 1)
        running = asyncio.create_task(engine.generate(request("running", max_tokens=1500)))
        await until_progress(engine, "running", 2)

        # Somebody else's weights are under the tokens from here on.
        await post(server, "/update_weight_version", {"new_version": "somebody-elses"})
        await until_progress(engine, "running", engine.progress("running") + 50)
        engine.abort(["running"])
        with pytest.raises(EngineError, match="'somebody-elses', which this engine did not bring"):
            await running
        await engine.close()

        # A collector that died in the middle of an update leaves a model of nothing, and a server that stands still.
        await post(server, "/pause?mode=keep")
        await post(server, "/start_weight_update")
        engine = make_server_engine(server.url, saved)
        await engine.start()
        with pytest.raises(EngineError, match="serves nothing yet"):
            await engine.generate(request("early"))
        await serve(engine, other, 7)
        assert engine.checksum == staged(other, Weights(1, 7)).checksum
        await generates_exactly(engine, other)

        await post(server, "/update_weight_version", {"new_version": "somebody-elses"})
        await engine.stage(staged(model, Weights(1, 8)))
        with pytest.raises(EngineError, match="another client changes"):
            await engine.activate()
        await engine.close()

        # A server that dies takes nobody with it, and nobody waits for it.
        engine = make_server_engine(server.url, saved)
        await engine.start()
        await serve(engine, make_model("qwen3", seed=3), 9)
        await generates_exactly(engine, make_model("qwen3", seed=3))
        first = asyncio.create_task(engine.generate(request("first", max_tokens=1500)))
        await until_progress(engine, "first", 2)
        tasks = [asyncio.create_task(engine.generate(request(f"r{n}", max_tokens=1500))) for n in range(20)]
        server.kill()
        async with asyncio.timeout(60):
            outcomes = await asyncio.gather(first, *tasks, return_exceptions=True)
        assert sum(isinstance(outcome, EngineError) for outcome in outcomes) >= 20  # the first one may have ended
        with pytest.raises(EngineError, match="does not generate any more"):
            await engine.generate(request("later"))
        await engine.close()
