"""What breaks in an SGLang server, and what the engine says then, against the double."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from asyncrl.collectors.engines.base import EngineError

from .sglang_double import SglangDouble, serving
from .sglang_ready import LIMIT_S, LLAMA, long, make_engine, ready
from .tiny_models import make_model

pytestmark = pytest.mark.asyncio


async def test_an_engine_that_is_started_again_goes_on_with_a_paused_server(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        one.double.corrupt = "model.norm.weight"
        with pytest.raises(EngineError):
            await one.serve(2)
        one.double.corrupt = ""
        await one.engine.close()
        await one.engine.start()
        with pytest.raises(EngineError, match="serves nothing yet"):
            await one.engine.generate(long("b"))
        await one.serve(3)
        assert set((await one.engine.generate(long("c"))).versions.tolist()) == {3}


async def test_a_server_that_another_process_updates_is_noticed(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        one.double.weight_version = "1/7/aa"
        with pytest.raises(EngineError, match="another process updates it"):
            await one.serve(2)


async def test_a_label_that_is_not_of_this_run_is_an_error_of_the_request(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        one.double.weight_version = "default"
        answer = await one.engine.generate(long("a"))
        assert (answer.finish_reason, len(answer.token_ids)) == ("error", 0)
        assert "not of this run" in answer.error


async def test_logprobs_that_are_no_numbers_are_an_error_without_tokens(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        one.double.nan = True
        answer = await one.engine.generate(long("a"))
        assert (answer.finish_reason, len(answer.token_ids)) == ("error", 0)
        assert "log-probs [None" in answer.error


async def test_a_server_that_dies_ends_all_requests(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        asked = long("a", tokens=4000)
        running = one.begin(asked, long("b", tokens=4000))
        await one.until("a", 1)
        await one.engine.check()
        one.double.die()
        with pytest.raises(EngineError):
            await one.engine.check()
        for answer in running:
            with pytest.raises(EngineError, match="does not generate any more"):
                await answer
        assert one.engine.free_slots == 4
        partial = one.engine.partial("a")  # to go on elsewhere
        assert partial is not None
        assert len(partial.token_ids) >= 1
        assert all(one.sampled_by(asked, partial))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("version", "0.5.9", "from 0.5.23 on"),
        ("tp_size", 2, "tp_size 2"),
        ("quantization", "fp8", "quantization 'fp8'"),
        ("preferred_sampling_params", '{"top_p": 0.9}', "preferred_sampling_params"),
        ("incremental_streaming_output", True, "incremental_streaming_output True"),
        ("frontend", "rust", "frontend 'rust'"),
    ],
)
async def test_a_server_that_was_started_otherwise_is_refused(
    saved: Path, tmp_path: Path, key: str, value: object, says: str
) -> None:
    async with asyncio.timeout(LIMIT_S), serving(SglangDouble(make_model(LLAMA))) as double:
        double.info[key] = value
        engine = make_engine(double, saved, tmp_path)
        with pytest.raises(EngineError, match=says):
            await engine.start()
        await engine.close()


async def test_a_server_that_is_not_there_is_said_so(saved: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    double = SglangDouble(make_model(LLAMA))
    double.url = url
    engine = make_engine(double, saved, tmp_path)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(EngineError, match=f"{url}/server_info: ConnectError"):
            await engine.start()
        await engine.close()


@pytest.mark.parametrize(
    ("answered", "says"),
    [
        ((500, b"CUDA out of memory. Tried to allocate 2 GiB"), "/generate failed with HTTP status 500: CUDA out of"),
        ((503, b""), "HTTP status 503"),
        ((401, b'{"error": "Unauthorized"}'), "HTTP status 401: .*Unauthorized"),
        ((200, b"data: <html>busy</html>\n\n"), "is no JSON: '<html>busy"),
        ((200, b'data: {"text": "no ids"}\n\n'), "does not answer as SGLang does: KeyError"),
        ((200, b'data: {"output_ids": [1], "meta_info": {"id": "a", "finish_rea'), "is no JSON"),
        ((200, b""), "ended an answer in the middle"),
    ],
)
async def test_a_server_that_answers_otherwise_than_sglang_does_ends_the_engine(
    saved: Path, tmp_path: Path, answered: tuple[int, bytes], says: str
) -> None:
    async with ready(saved, tmp_path) as one:
        one.double.instead = answered
        with pytest.raises(EngineError, match=says):
            await one.engine.generate(long("a"))
        with pytest.raises(EngineError, match=says):
            await one.engine.generate(long("b"))


async def test_what_the_server_refuses_of_one_request_ends_no_other(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        (running,) = one.begin(long("a"))
        await one.until("a", 1)
        one.double.instead = (400, b'{"error": {"message": "Requested token count exceeds the context length"}}')
        with pytest.raises(ValueError, match=r"request b: SGLang refuses it: .*exceeds the context length"):
            await one.engine.generate(long("b"))
        assert (await running).finish_reason == "length"


async def test_a_request_that_the_server_gives_up_is_an_error_of_the_request(saved: Path, tmp_path: Path) -> None:
    """`Scheduler` aborts what cannot be decoded any more for want of memory, with a status."""
    async with ready(saved, tmp_path) as one:
        one.double.out_of_memory = True
        answer = await one.engine.generate(long("a"))
        assert (answer.finish_reason, len(answer.token_ids)) == ("error", 0)
        assert "Out of memory" in answer.error


async def test_nobody_waits_for_a_server_that_stands_still_once_the_engine_is_closed(
    saved: Path, tmp_path: Path
) -> None:
    async with ready(saved, tmp_path) as one:
        (running,) = one.begin(long("a"))
        await one.until("a", 1)
        one.double.steps.clear()
        await one.engine.close()
        with pytest.raises(EngineError, match="it was closed"):
            await running
        assert one.engine.partial("a") is not None
