"""A double of a vLLM server, written from the source of vLLM 0.32 (vllm/entrypoints: `scale_out/token_in_token_out`,
`rl/online`), for what a real one cannot be made to do: `tests/vllm` has those. It samples token 7 for ever."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from asyncrl.collectors.engines.vllm_about import About
from asyncrl.weights.reach import here

from .http_double import HttpDouble, listening

ABOUT = About(
    memory=here().memory,
    transfer="asyncrl",
    logprobs_mode="processed_logprobs",
    dtype="float32",
    head_dtype="float32",
    slots=4,
    max_length=4096,
    vocabulary=61,
    workers=1,
    api_processes=1,
    max_logprobs=-1,
    own_ends=False,
    transforms=(),
    cpu=True,
    chunked_prefill=False,
    updating=False,
)


class VllmDouble(HttpDouble):
    """Attributes that tests set stand for what goes wrong in a server."""

    def __init__(self) -> None:
        super().__init__()
        self.label = "default"
        self.checksum = ""  # of what its worker computes with
        self.key = ""  # it asks for
        self.health = 200
        self.instead: tuple[int, bytes] | None = None  # status and body of what generate answers
        self.then: dict[str, Any] | None = None  # an event in the middle of an answer
        self.logprob: float | None = -0.5  # of the third token
        self.steps = asyncio.Event()  # while set, it samples
        self.steps.set()
        self._aborted: set[str] = set()

    async def respond(self, route: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        match route:
            case "/health":
                self.answer(writer, self.health, b"")
            case "/weight_info":
                self.answer(writer, 200, json.dumps({"weight_version": self.label}).encode())
            case "/collective_rpc":
                self.answer(writer, 200, json.dumps({"results": [self._rpc(body["method"])]}).encode())
            case "/update_weight_version":
                self.label = body["new_version"]
                self.answer(writer, 200, b"{}")
            case "/inference/v1/abort_requests":
                self._aborted.update(body["request_ids"])
                self.answer(writer, 200, b"{}")
            case "/inference/v1/generate" if self.key:
                self.answer(writer, 401, b'{"error": "Unauthorized"}')
            case "/inference/v1/generate" if not body:
                self.answer(writer, 400, b'{"error": {"message": "Field required"}}')
            case "/inference/v1/generate" if self.instead is not None:
                self.answer(writer, *self.instead)
            case "/inference/v1/generate":
                await self.stream(writer, self._tokens(body))
            case _:  # pauses, and the steps of an update
                self.answer(writer, 200, b"{}")

    def _rpc(self, method: str) -> Any:
        match method:
            case "asyncrl_about":
                return msgspec.to_builtins(ABOUT)
            case "asyncrl_check":
                return ""
            case _:
                return [self.checksum, ""]

    async def _tokens(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """`serve_tokens_stream_generator`: one event a token, and the end by itself."""
        wanted = body["sampling_params"]["max_tokens"]
        for place in range(wanted):
            await asyncio.sleep(0.001)
            await self.steps.wait()
            if f"generate-tokens-{body['request_id']}" in self._aborted:
                break
            if place == 2 and self.then is not None:
                yield self.then
                return
            likeliest = {"token_id": 7, "logprob": self.logprob if place == 2 else -0.5, "rank": 1}
            content = [{**likeliest, "top_logprobs": [likeliest]}]  # one, also where none is asked for
            yield {"choices": [{"index": 0, "token_ids": [7], "logprobs": {"content": content}}]}
        else:
            yield self._end("length", wanted)
            return
        yield self._end("abort", place)

    def _end(self, reason: str, tokens: int) -> dict[str, Any]:
        spans = [{"version": self.label, "start": 0, "end": tokens}]
        return {"choices": [{"index": 0, "token_ids": [], "finish_reason": reason, "weight_versions": spans}]}


@asynccontextmanager
async def serving(double: VllmDouble) -> AsyncIterator[VllmDouble]:
    """The double behind a port of this host."""
    async with listening(double):
        yield double
