"""A running SGLang server, as asyncrl talks to it: its routes over HTTP, and what it must have been started with.

`make test-sglang` compares every route, field and answer here with the source of the published package.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx2
import msgspec

from asyncrl.collectors.engines.base import EngineError

FIRST_VERSION = (0, 5, 23)
"""Before it the checksums and versions of the server were not read."""

LIMIT_S = 30.0
"""For a call that only reads or marks something; what loads or hashes weights has the deadline of its phase."""

REQUIRED: Mapping[str, tuple[Any, ...]] = {
    # What is served is one plain model, whose tensors are hashed whole.
    "tp_size": (1,),
    "pp_size": (1,),
    "dp_size": (1,),
    "quantization": (None,),
    "enable_lora": (None, False),
    # What is sampled is what was asked for, and its log-probs are those of the distribution that it was drawn from.
    "speculative_algorithm": (None,),
    "preferred_sampling_params": (None,),
    "enable_watermark": (False,),
    "allow_auto_truncate": (False,),
    # No keys and values outlive their weights: flushing drops those in the GPU only.
    "enable_hierarchical_cache": (False,),
    "disaggregation_mode": ("null",),
    # Each part of an answer repeats what came before: the last one has all of it.
    "incremental_streaming_output": (False,),
    "frontend": ("python",),
}
"""By key of `/server_info`, what it may say."""

READ = ("device", "max_req_input_len")
"""What else is read there."""


class RefusedError(ValueError):
    """The server says no to a request (HTTP 400), with its reason."""


class SglangServer:
    """One server. Calls raise EngineError if it cannot be reached or fails, RefusedError where it refuses."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        """`url`: http(s)://host:port."""
        self.url = url.rstrip("/")
        # No proxy of the environment's: answers are streams that it might hold back.
        self._http = httpx2.AsyncClient(
            base_url=self.url,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=httpx2.Timeout(LIMIT_S),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def info(self) -> dict[str, Any]:
        """How it was started, `REQUIRED` and `device` ("cuda", "cpu", ...) among it."""
        return await self._call("GET", "/server_info")

    async def label(self) -> str:
        """The version that it stamps tokens with."""
        return str((await self._call("GET", "/model_info"))["weight_version"])

    async def pause(self) -> None:
        """Stop after the step that runs, whose tokens are counted still; what ran waits, without keys and values."""
        await self._call("POST", "/pause_generation", {"mode": "retract"})

    async def load(self, folder: str, label: str) -> None:
        """Load the safetensors files of a folder; drop all keys and values; stamp tokens with `label` from here on."""
        body = {"model_path": folder, "load_format": "auto", "flush_cache": True, "weight_version": label}
        await self._call("POST", "/update_weights_from_disk", body, limit_s=None)

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._call("POST", "/continue_generation", {"torch_empty_cache": False})

    async def checksums(self) -> dict[str, str]:
        """Of the tensors that it computes with, by their names there. It decodes nothing meanwhile."""
        answer = await self._call(
            "POST", "/weights_checker", {"action": "checksum", "selector": "target"}, limit_s=None
        )
        ranks = answer["ranks"]
        if len(ranks) != 1:
            raise EngineError(f"the SGLang server at {self.url} reports checksums of {len(ranks)} GPUs; 1 is served")
        return dict(ranks[0]["checksums"])

    async def abort(self, rid: str) -> None:
        """End a request at the next step. It is ignored where the request has not arrived yet."""
        await self._call("POST", "/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        await self._call("POST", "/abort_request", {"abort_all": True})

    async def generate(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The parts of one answer, each with all that came before. Nothing but the caller bounds it: a request may wait
        for a slot, and the collector ends an engine that makes no token for too long."""
        try:
            async with self._http.stream(
                "POST", "/generate", json={**body, "stream": True}, timeout=httpx2.Timeout(LIMIT_S, read=None)
            ) as response:
                if response.is_error:
                    await response.aread()
                    raise self._refusal(response, "/generate")
                async for line in response.aiter_lines():
                    data = line.removeprefix("data: ")
                    if data == "[DONE]":
                        return
                    if data:
                        yield self._part(data)
        except httpx2.HTTPError as error:
            raise self._failed("/generate", error) from error
        raise EngineError(f"the SGLang server at {self.url} ended an answer in the middle")

    def _part(self, data: str) -> dict[str, Any]:
        try:
            part: dict[str, Any] = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise EngineError(f"the SGLang server at {self.url} answered what is no JSON: {data[:200]!r}") from error
        if "error" in part:
            raise RefusedError(str(part["error"].get("message", part["error"])))
        return part

    async def _call(
        self, method: str, route: str, body: Mapping[str, Any] | None = None, *, limit_s: float | None = LIMIT_S
    ) -> dict[str, Any]:
        """limit_s None: the caller's."""
        try:
            response = await self._http.request(method, route, json=body, timeout=httpx2.Timeout(LIMIT_S, read=limit_s))
        except httpx2.HTTPError as error:
            raise self._failed(route, error) from error
        if response.is_error:
            raise self._refusal(response, route)
        if not response.content:  # an abort has none
            return {}
        try:
            answer: dict[str, Any] = msgspec.json.decode(response.content)
        except msgspec.DecodeError as error:
            raise EngineError(f"{self.url}{route} answered what is no JSON: {response.text[:200]!r}") from error
        return answer

    def _refusal(self, response: httpx2.Response, route: str) -> EngineError | RefusedError:
        said = response.text[:500]
        if response.status_code == httpx2.codes.BAD_REQUEST:
            return RefusedError(said)
        return EngineError(f"{self.url}{route} failed with HTTP status {response.status_code}: {said}")

    def _failed(self, route: str, error: Exception) -> EngineError:
        return EngineError(f"{self.url}{route}: {type(error).__name__}: {error}")


def refused(info: Mapping[str, Any]) -> str:
    """Why a server that says this of itself cannot be used; "" if it can."""
    version = str(info.get("version", ""))
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < FIRST_VERSION:
        return f"it is SGLang {version or 'of no version'}; from {'.'.join(map(str, FIRST_VERSION))} on it will do"
    for key in (*REQUIRED, *READ):
        if key not in info:
            return f"it does not say its {key}"
    for key, allowed in REQUIRED.items():
        if info[key] not in allowed:
            return f"it was started with {key} {info[key]!r}; start it with {key} {allowed[0]!r} (docs/engines.md)"
    return ""
