"""The vLLM engine over a server that runs already: `vllm serve`, started by somebody else, on this host.

It does what the engine in processes of its own does, with the same proof of what is served, through the server's own
HTTP API. The server outlives it: a collector that comes next brings its weights first, and serves nothing before.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.collectors.engines.base import EngineError, Request
from asyncrl.collectors.engines.vllm_about import unfit
from asyncrl.collectors.engines.vllm_base import VllmBase
from asyncrl.collectors.engines.vllm_client import VllmClient
from asyncrl.collectors.engines.vllm_request import sampling_of
from asyncrl.weights.reach import here

if TYPE_CHECKING:
    from asyncrl.collectors.engines.vllm_base import Llm

READY_S = 120.0
"""For a server that is started just now, or again. vLLM takes half a minute and more to start."""


class VllmServerEngine(VllmBase):
    """The server at `url`, of which `slots` requests are asked at once.

    api_key_env: the environment variable with its API key; None: it wants none. dtype, max_length: what the recipe asks
    for; a server that has less is refused at the start.
    """

    def __init__(
        self,
        name: str,
        model_path: Path,
        *,
        url: str,
        api_key_env: str | None,
        slots: int,
        max_length: int | None,
        dtype: str,
        trust_remote_code: bool,
    ) -> None:
        super().__init__(name, model_path, slots=slots, trust_remote_code=trust_remote_code)
        self._url = url
        self._api_key_env = api_key_env
        self._max_length = max_length
        self._dtype = dtype
        self._own_ends = False

    async def _begin(self) -> Llm:
        """Find the server, and whether it can do what is needed. Raises EngineError with what to start it with."""
        client = VllmClient(self._url, api_key=self._api_key_env and os.environ.get(self._api_key_env))
        try:
            await client.wait(READY_S)
            about = await self._call(client.about())
            if faults := unfit(
                about, memory=here().memory, dtype=self._dtype, slots=self._slots, max_length=self._max_length
            ):
                raise EngineError(f"the server at {self._url} cannot be used: {'; '.join(faults)}")
            if about.updating:  # whoever began it is gone; no other one could begin
                await self._call(client.finish_weight_update())
        except BaseException:
            await client.close()
            raise
        self._limit, self._vocabulary = self._max_length or about.max_length, about.vocabulary
        self._most = about.vocabulary if about.max_logprobs == -1 else about.max_logprobs
        self._own_ends = about.own_ends
        return client

    def _inexact(self, request: Request) -> str:
        if request.sampling.min_tokens and self._own_ends:
            return (
                f"min_tokens {request.sampling.min_tokens}: this server would also hold back end tokens of the model's "
                "own; start it with --generation-config vllm --skip-tokenizer-init"
            )
        return super()._inexact(request)

    def _sampling(self, request: Request) -> Any:
        return sampling_of(request, limit=self._limit, vocabulary=self._vocabulary)

    async def _load(self, llm: Llm, offer: dict[str, Any]) -> None:
        await llm.update_weights(offer)

    async def _release(self, llm: Any) -> None:
        """The server goes on; it belongs to whoever started it."""
        await llm.close()
