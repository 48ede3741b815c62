"""What breaks in a vLLM server, and what the engine says then, against a double; `tests/vllm` has real servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.collectors.engines.base import EngineError
from asyncrl.collectors.engines.vllm_server import VllmServerEngine
from asyncrl.staleness import Weights

from .tiny_models import make_model, request, staged
from .vllm_double import VllmDouble, serving

pytestmark = pytest.mark.asyncio

LIMIT_S = 60.0


def make_engine(double: VllmDouble, saved: Path, key: str | None = None) -> VllmServerEngine:
    return VllmServerEngine(
        "e0",
        saved,
        url=double.url,
        api_key_env=key,
        slots=4,
        max_length=None,
        dtype="float32",
        trust_remote_code=False,
    )


@asynccontextmanager
async def ready(saved: Path) -> AsyncIterator[tuple[VllmServerEngine, VllmDouble]]:
    """An engine that serves version 1."""
    async with asyncio.timeout(LIMIT_S), serving(VllmDouble()) as double:
        engine = make_engine(double, saved)
        try:
            await engine.start()
            await serve(engine, double, 1)
            yield engine, double
        finally:
            await engine.close()


async def serve(engine: VllmServerEngine, double: VllmDouble, version: int) -> None:
    weights = staged(make_model(seed=version), 1, version)
    double.checksum = weights.checksum
    await engine.stage(weights)
    await engine.activate()


async def until(engine: VllmServerEngine, id: str, tokens: int) -> None:
    while engine.progress(id) < tokens:  # noqa: ASYNC110 - progress is polled by contract; LIMIT_S bounds it
        await asyncio.sleep(0.001)


async def test_the_double_answers_as_a_server_does(saved: Path) -> None:
    async with ready(saved) as (engine, _):
        answer = await engine.generate(request("a", max_tokens=9))
        assert (answer.finish_reason, answer.error) == ("length", "")
        assert answer.token_ids.tolist() == [7] * 9
        assert [span.weights for span in answer.spans] == [Weights(1, 1)]


@pytest.mark.parametrize(
    ("answered", "says"),
    [
        ((500, b'{"error": {"message": "CUDA out of memory"}}'), "answers 500: CUDA out of memory"),
        ((503, b""), "answers 503"),
        ((401, b'{"error": "Unauthorized"}'), "answers 401: Unauthorized"),
        ((200, b"data: <html>busy</html>\n\n"), "does not answer as vLLM does .*<html>busy"),
        ((200, b'data: {"choices": [{"token_ids": "7"}]}\n\n'), "does not answer as vLLM does .*array"),
        ((200, b'data: {"choices": [{"token_ids": [7], "finish_rea'), "does not answer as vLLM does"),
        ((200, b'data: {"choices": [{"token_ids": [7]}]}\n\n'), "AttributeError"),
        ((200, b""), "ended an answer without its end"),
    ],
)
async def test_a_server_that_answers_otherwise_than_vllm_does_ends_the_engine(
    saved: Path, answered: tuple[int, bytes], says: str
) -> None:
    async with ready(saved) as (engine, double):
        double.instead = answered
        with pytest.raises(EngineError, match=says):
            await engine.generate(request("a"))
        with pytest.raises(EngineError, match=says):
            await engine.generate(request("b"))


async def test_what_the_server_refuses_of_one_request_ends_no_other(saved: Path) -> None:
    async with ready(saved) as (engine, double):
        running = asyncio.create_task(engine.generate(request("a", max_tokens=200)))
        await until(engine, "a", 1)
        double.instead = (400, b'{"error": {"message": "maximum context length is 4096 tokens"}}')
        with pytest.raises(ValueError, match=r"request b: vLLM refuses it: .*maximum context length is 4096"):
            await engine.generate(request("b"))
        assert (await running).finish_reason == "length"


@pytest.mark.parametrize("logprob", [-9999.0, None])
async def test_logprobs_that_are_no_numbers_are_an_error_or_the_end(saved: Path, logprob: float | None) -> None:
    """-9999.0 is what a server writes for one that is not a number; null it never writes."""
    async with ready(saved) as (engine, double):
        double.logprob = logprob
        if logprob is None:
            with pytest.raises(EngineError, match=r"does not answer as vLLM does .*null"):
                await engine.generate(request("a"))
        else:
            answer = await engine.generate(request("a"))
            assert (answer.finish_reason, len(answer.token_ids)) == ("error", 0)
            assert answer.error.startswith("the logprobs of tokens 1 to 12 are [-0.5, nan")


async def test_an_answer_that_fails_in_its_middle_is_an_error_of_the_request_if_the_server_goes_on(
    saved: Path,
) -> None:
    async with ready(saved) as (engine, double):
        double.then = {"error": {"message": "Internal server error", "code": 500}}
        answer = await engine.generate(request("a"))
        assert (answer.finish_reason, len(answer.token_ids)) == ("error", 0)
        assert "Internal server error" in answer.error
        double.health = 503
        with pytest.raises(EngineError, match="failed: Internal server error"):
            await engine.generate(request("b"))


async def test_a_server_is_well_while_it_says_so_and_answers(saved: Path) -> None:
    async with ready(saved) as (engine, double):
        await engine.check()
        double.health = 503
        with pytest.raises(EngineError, match="answers /health with 503"):
            await engine.check()


async def test_a_server_that_wants_another_key_is_said_at_the_start(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", "wrong")
    async with asyncio.timeout(LIMIT_S), serving(VllmDouble()) as double:
        double.key = "right"
        with pytest.raises(EngineError, match=r"wants an API key.*collector\.engine\.api_key_env"):
            await make_engine(double, saved, "SOME_KEY").start()


async def ended(engine: VllmServerEngine, running: asyncio.Task[Any], says: str) -> None:
    with pytest.raises(EngineError, match=says):
        await running
    partial = engine.partial("a")  # to go on elsewhere
    assert partial is not None
    assert partial.token_ids.tolist() == [7] * len(partial.token_ids)
    assert len(partial.token_ids) >= 3
    assert [span.weights for span in partial.spans] == [Weights(1, 1)]


async def test_a_server_that_dies_ends_all_requests_and_what_they_had_is_known(saved: Path) -> None:
    async with ready(saved) as (engine, double):
        running = asyncio.create_task(engine.generate(request("a", max_tokens=4000)))
        await until(engine, "a", 3)
        double.die()
        await ended(engine, running, "vLLM failed at request a: (RemoteProtocolError|ReadError)")


async def test_nobody_waits_for_a_server_that_stands_still_once_the_engine_is_closed(saved: Path) -> None:
    async with ready(saved) as (engine, double):
        running = asyncio.create_task(engine.generate(request("a", max_tokens=4000)))
        await until(engine, "a", 3)
        double.steps.clear()
        await engine.close()
        await ended(engine, running, "it was closed")


async def test_where_another_client_puts_weights_nothing_is_known_of_what_was_sampled(saved: Path) -> None:
    async with ready(saved) as (engine, double):
        running = asyncio.create_task(engine.generate(request("a", max_tokens=4000)))
        await until(engine, "a", 3)
        double.label = "1/9/somebody-elses"
        with pytest.raises(EngineError, match="another client changes them"):
            await serve(engine, double, 2)
        with pytest.raises(EngineError, match="another client changes them"):
            await running
        assert engine.partial("a") is None
