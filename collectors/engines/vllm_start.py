"""vLLM's processes, as asyncrl needs them: what it sets, and what it takes on a CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from asyncrl.collectors.engines.base import EngineError
from asyncrl.collectors.engines.vllm_about import FLOAT32_HEAD, LOGPROBS, TRANSFER
from asyncrl.collectors.engines.vllm_tether import OWNER

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",  # nothing of a run is told to anybody
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM's own choice is the first core, for every engine of the machine
}
"""For vLLM's processes, where the environment does not say otherwise."""

ON_A_CPU = {
    "kv_cache_memory_bytes": 1 << 30,  # else most of the machine's memory, in which learner and store live too
    "enforce_eager": True,  # to compile takes longer than most runs on a CPU
    # A prompt that is prefilled in parts would end vLLM 0.32: it takes a part's draw back from the request's generator,
    # which none on a CPU can do.
    "enable_chunked_prefill": False,
}
"""vLLM's arguments where it computes on a CPU and the recipe does not say otherwise."""


def chosen(arguments: Mapping[str, Any], *, cpu: bool, gpus: int, place: int) -> dict[str, Any]:
    """vLLM's arguments for those that are given (None: vLLM's own choice), on a CPU or on one of so many GPUs."""
    given = {name: value for name, value in arguments.items() if value is not None}
    if cpu:
        return {**ON_A_CPU, **given}
    # Counted by vLLM as here, within CUDA_VISIBLE_DEVICES. Without it every engine would take the first.
    return {**given, "device_ids": [place % gpus]} if gpus else given


def start_vllm(slots: int, arguments: Mapping[str, Any], *, place: int = 0) -> AsyncLLM:
    """vLLM's processes, for these arguments, on one of the GPUs that this process sees, which are dealt out in turn by
    `place`. Blocks for as long as they start; in any thread."""
    import torch

    for name, value in {**ENVIRONMENT, "OMP_NUM_THREADS": str(torch.get_num_threads())}.items():
        os.environ.setdefault(name, value)
    os.environ[OWNER] = str(os.getpid())
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    if missing := [name for name in ("start_weight_update", "update_weight_version") if not hasattr(AsyncLLM, name)]:
        raise EngineError(f"this vLLM has no {missing[0]}: use one from 0.32 on")
    given = chosen(arguments, cpu=current_platform.is_cpu(), gpus=torch.cuda.device_count(), place=place)
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            **given,
            hf_overrides=FLOAT32_HEAD,
            max_num_seqs=slots,
            skip_tokenizer_init=True,  # ids go in, ids come out
            generation_config="vllm",  # the model folder's own sampling defaults change nothing
            logprobs_mode=LOGPROBS,
            max_logprobs=-1,  # a request that truncates asks for those of all that may be left
            weight_transfer_config=WeightTransferConfig(backend=TRANSFER),
            worker_extension_cls="asyncrl.collectors.engines.vllm_worker.WorkerPart",
            disable_log_stats=True,
        )
    )
