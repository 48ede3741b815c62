"""A vLLM server over HTTP, by the names that vLLM's `AsyncLLM` has for the same.

    tokens in, tokens out        /inference/v1/generate, /inference/v1/abort_requests    --tokens-only
    weights, pauses, the proof   /pause, /start_weight_update, /collective_rpc, ...      VLLM_SERVER_DEV_MODE=1

Of vLLM 0.32 and 0.33, vllm/entrypoints: `scale_out/token_in_token_out` and `rl/online`. JSON carries a logprob exactly:
it is written with all digits of its float. One connection a request: a server closes one that was idle for 5 s, and a
request that is just then sent on it would be lost.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx2
import msgspec

from asyncrl.collectors.engines.base import EngineError
from asyncrl.collectors.engines.streamed import ForeignWeightsError
from asyncrl.collectors.engines.vllm_about import About

logger = logging.getLogger(__name__)

GENERATE, ABORT = "/inference/v1/generate", "/inference/v1/abort_requests"

NAMED = "generate-tokens-"
"""What the server puts before the id of a request, and expects where one is to be aborted."""

NO_LOGPROB = -9999.0
"""What the server writes for a logprob that is not a number, infinite or missing."""

CONNECT_S = 10.0

CALL_S = 600.0
"""Between two bytes of an answer that is no generation: only what hangs takes so long. A generation has no such limit,
since it stands still while it waits for a slot or for weights: who waits for it watches its progress."""

POLL_S = 1.0
"""How often a server is asked whether it is there."""


class _Logprob(msgspec.Struct):
    token_id: int
    logprob: float
    top_logprobs: list[_Logprob] = []


class Logprobs(msgspec.Struct):
    """As vLLM's `FlatLogprobs`: of sampled token t, the entries start_indices[t] to end_indices[t] of ids and logprobs:
    its own first, then those of the likeliest."""

    content: list[_Logprob] = []
    start_indices: list[int] = []
    end_indices: list[int] = []
    token_ids: list[int] = []
    logprobs: list[float] = []

    def __post_init__(self) -> None:
        for sampled in self.content:
            self.start_indices.append(len(self.logprobs))
            for entry in (sampled, *sampled.top_logprobs):
                self.token_ids.append(entry.token_id)
                self.logprobs.append(math.nan if entry.logprob == NO_LOGPROB else entry.logprob)
            self.end_indices.append(len(self.logprobs))


class VersionSpan(msgspec.Struct):
    """Tokens [start, end) of the answer were sampled by the weights labelled `version`."""

    version: str
    start: int
    end: int


class Part(msgspec.Struct):
    """What came since the last one. `finish_reason` and `weight_versions` (of the whole answer): at its end."""

    token_ids: list[int] = []
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[VersionSpan] | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int = 500


class Output(msgspec.Struct):
    """One event of an answer, as vLLM's `RequestOutput`."""

    outputs: list[Part] = msgspec.field(default_factory=list, name="choices")
    error: _Error | None = None

    @property
    def finished(self) -> bool:
        return any(part.finish_reason is not None for part in self.outputs)


class VllmClient:
    """One server, at `url`. What fails raises EngineError, what it refuses of a request ValueError, and a server that
    cannot be reached one of httpx2's errors."""

    def __init__(self, url: str, *, api_key: str | None) -> None:
        self._url = url
        self._http = httpx2.AsyncClient(
            base_url=url,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=httpx2.Timeout(CALL_S, connect=CONNECT_S),
            limits=httpx2.Limits(max_keepalive_connections=0),
            trust_env=False,  # a proxy is never between: both are on one host
        )
        self._decoder = msgspec.json.Decoder(Output)
        self._label = ""  # of the weights that were put there last
        self._labels: set[str] = set()  # of all that were

    async def close(self) -> None:
        """What still runs there is aborted by the server, when its connection ends."""
        await self._http.aclose()

    # --- what is there ------------------------------------------------------------------------------------------------

    async def wait(self, limit_s: float) -> None:
        """Wait until the server is ready. Raises EngineError if it is not within `limit_s`."""
        deadline, told = time.monotonic() + limit_s, False
        while True:
            try:
                status = (await self._http.get("/health")).status_code
                if status == 200:
                    return
                found = f"it answers /health with {status}"
            except httpx2.TransportError as error:
                found = f"{type(error).__name__}: {error}"
            if time.monotonic() >= deadline:
                raise EngineError(
                    f"no vLLM server is ready at {self._url} within {limit_s:.0f} s ({found}). Start one as in "
                    "docs/engines.md, or correct collector.engine.url"
                )
            if not told:
                logger.warning("no vLLM server is ready at %s yet: waiting up to %.0f s for it", self._url, limit_s)
                told = True
            await asyncio.sleep(POLL_S)

    async def check_health(self) -> None:
        """Raises EngineError if the server says that its engine is dead."""
        status = (await self._http.get("/health")).status_code
        if status != 200:
            raise EngineError(f"the server at {self._url} answers /health with {status}")

    async def about(self) -> About:
        """What the server is. Raises EngineError if it lacks what asyncrl needs, with what to start it with."""
        response = await self._http.get("/weight_info")
        if response.status_code == 404:
            raise EngineError(
                f"the server at {self._url} takes no weights: start it with VLLM_SERVER_DEV_MODE=1 in its environment "
                "(vLLM 0.32 or newer)"
            )
        _check(response)
        try:
            (about, *_) = await self.collective_rpc("asyncrl_about")
        except EngineError as error:
            raise EngineError(
                f"the worker of the server at {self._url} does not know asyncrl: start it, where asyncrl of this "
                "version is installed, with --worker-extension-cls asyncrl.collectors.engines.vllm_worker.WorkerPart "
                f"({error})"
            ) from error
        # An empty request: refused for what it lacks, if such requests are answered at all.
        response = await self._post(GENERATE, {})
        if response.status_code == 401:
            raise EngineError(
                f"the server at {self._url} wants an API key, another one than it got, if any: put it into an "
                "environment variable and name that in collector.engine.api_key_env"
            )
        if response.status_code not in (400, 422):
            raise EngineError(
                f"the server at {self._url} does not take token ids: start it with --tokens-only, or with "
                f"--enable-scale-out ({GENERATE} answers {response.status_code}: {_said(response)})"
            )
        return msgspec.convert(about, About)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt: dict[str, Any], sampling: dict[str, Any], name: str
    ) -> AsyncGenerator[Output, None]:
        """The answer, as it comes. prompt: prompt_token_ids and cache_salt. sampling: of vLLM's SamplingParams."""
        body = {
            "request_id": name,
            "token_ids": prompt["prompt_token_ids"],
            "cache_salt": prompt["cache_salt"].replace("/", "-"),  # over HTTP vLLM takes none with a slash
            "sampling_params": sampling,
            "stream": True,
        }
        ended = False
        timeout = httpx2.Timeout(None, connect=CONNECT_S)
        async with self._http.stream("POST", GENERATE, timeout=timeout, **_json(body)) as response:
            if response.status_code != 200:
                await response.aread()
                _check(response)
            async for line in response.aiter_lines():
                kind, _, text = line.partition(": ")
                if kind != "data" or text == "[DONE]":
                    continue
                try:
                    output = self._decoder.decode(text)
                except msgspec.DecodeError as error:
                    raise EngineError(
                        f"the server at {self._url} does not answer as vLLM does ({error}): {text[:200]!r}"
                    ) from error
                if output.error is not None:
                    output = await self._failed(output.error)
                for part in output.outputs:
                    self._check_labels(part.weight_versions or ())
                ended = ended or output.finished
                yield output
        if not ended:
            raise EngineError(f"the server at {self._url} ended an answer without its end")

    async def _failed(self, error: _Error) -> Output:
        """An error in the middle of an answer: the end of this one, if the server goes on."""
        if error.code < 500:
            raise ValueError(error.message)
        try:
            await self.check_health()
        except EngineError:
            raise EngineError(f"the server at {self._url} failed: {error.message}") from None
        return Output(outputs=[Part(finish_reason=f"error: {error.message}")])

    def _check_labels(self, spans: Sequence[VersionSpan]) -> None:
        for span in spans:
            if span.start < span.end and span.version not in self._labels:
                raise self._others(span.version)

    def _others(self, label: str) -> ForeignWeightsError:
        return ForeignWeightsError(
            f"the server at {self._url} serves weights {label!r}, which this engine did not bring: another client "
            "changes them. Give each collector a server of its own"
        )

    async def abort(self, names: Sequence[str]) -> None:
        _check(await self._post(ABORT, {"request_ids": [f"{NAMED}{name}" for name in names]}))

    # --- weights ------------------------------------------------------------------------------------------------------

    async def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        """What each worker answers: maps and lists as they are, anything else as text."""
        response = _check(await self._post("/collective_rpc", {"method": method, "args": args}))
        results: list[Any] = msgspec.json.decode(response.content)["results"]
        return results

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        """Raises EngineError if somebody else has put weights there since this client did: the server is theirs."""
        if self._label:
            response = _check(await self._http.get("/weight_info"))
            if (label := str(msgspec.json.decode(response.content)["weight_version"])) != self._label:
                raise self._others(label)
        _check(await self._http.post("/pause", params={"mode": mode, "clear_cache": clear_cache}))

    async def resume_generation(self) -> None:
        _check(await self._post("/resume", {}))

    async def start_weight_update(self) -> None:
        _check(await self._post("/start_weight_update", {}))

    async def update_weights(self, offer: dict[str, Any]) -> None:
        _check(await self._post("/update_weights", {"update_info": {"offer": offer}}))

    async def finish_weight_update(self) -> None:
        _check(await self._post("/finish_weight_update", {}))

    async def update_weight_version(self, label: str) -> None:
        _check(await self._post("/update_weight_version", {"new_version": label}))
        self._label = label
        self._labels.add(label)

    async def _post(self, path: str, body: dict[str, Any]) -> httpx2.Response:
        return await self._http.post(path, **_json(body))


def _json(body: dict[str, Any]) -> dict[str, Any]:
    return {"content": msgspec.json.encode(body), "headers": {"Content-Type": "application/json"}}


def _check(response: httpx2.Response) -> httpx2.Response:
    """The response, if it is a good one. Raises ValueError for a request that is refused, EngineError for all else."""
    if response.status_code == 200:
        return response
    what = f"{response.request.url.path} answers {response.status_code}: {_said(response)}"
    if response.request.url.path.endswith(GENERATE) and response.status_code in (400, 422):
        raise ValueError(what)
    raise EngineError(what)


def _said(response: httpx2.Response) -> str:
    """The message of an error, in one of the forms that vLLM has for it, else the text."""
    try:
        found = msgspec.json.decode(response.content, type=dict[str, Any])
    except msgspec.DecodeError:
        return response.text[:500]
    error = found.get("error", found.get("detail", found))
    return str(error.get("message", error) if isinstance(error, dict) else error)[:2000]
