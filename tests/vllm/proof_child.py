"""One vLLM worker in this process, loaded and read back: prints what the proof says of each case as one JSON object.

`python -m tests.vllm.proof_child ARCHITECTURE DTYPE FOLDER`
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

import torch
from vllm import LLM
from vllm.config import WeightTransferConfig

from asyncrl.collectors.engines import vllm_worker
from asyncrl.collectors.engines.vllm_about import FLOAT32_HEAD, TRANSFER
from asyncrl.staleness import Weights
from asyncrl.weights.base import StagedWeights
from asyncrl.weights.image import Images
from asyncrl.weights.manifest import Form, dtype_name
from asyncrl.weights.shm import shm_offer
from tests.vllm.models import make_model, staged


def main(architecture: str, dtype: str, folder: Path) -> None:
    make_model(architecture, seed=99).save_pretrained(folder)
    llm = LLM(
        model=str(folder),
        dtype=dtype,
        hf_overrides=FLOAT32_HEAD,
        max_num_seqs=2,
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=True,
        skip_tokenizer_init=True,
        weight_transfer_config=WeightTransferConfig(backend=TRANSFER),
        worker_extension_cls="asyncrl.collectors.engines.vllm_worker.WorkerPart",
    )
    worker: Any = llm.llm_engine.model_executor.driver_worker.worker
    images = Images("test", folder=folder)

    def load(weights: StagedWeights) -> None:
        offer = shm_offer(images.write(weights.weights, weights.tensors.items(), tied=weights.tied, hashed=False))
        worker.start_weight_update()
        worker.update_weights({"offer": offer})
        worker.finish_weight_update()

    def proven(weights: StagedWeights) -> bool:
        checksum, wrong = worker.asyncrl_prove()
        return wrong == "" and checksum == weights.checksum

    def version(seed: int, change: Callable[[dict[str, torch.Tensor]], object] = lambda _: None) -> StagedWeights:
        model = make_model(architecture, seed=seed).to(getattr(torch, dtype))
        change(model.state_dict())
        return staged(model, Weights(1, seed))

    said: dict[str, Any] = {}
    good = version(1)
    forms = [Form(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in good.tensors.items()]
    said["fits"] = worker.asyncrl_check(forms, dict(good.tied))
    for seed in (1, 2, 3):
        weights = version(seed)
        load(weights)
        said[f"version {seed}"] = [proven(weights), proven(weights)]

    signs = version(4, lambda state: [tensor.view(-1)[::7].fill_(-0.0) for tensor in state.values()])
    load(signs)
    said["negative zeros"] = proven(signs)
    nan = version(5, lambda state: state["model.layers.0.mlp.down_proj.weight"].view(-1)[3].fill_(float("nan")))
    load(nan)
    said["not a number"] = proven(nan)

    load(version(1))
    said["another version"] = proven(version(2))

    def tampered(name: str) -> bool:
        """Proven at first; then a parameter changes behind everybody's back."""
        load(good)
        assert proven(good)
        live, _ = vllm_worker.ServedModel(worker.weight_transfer_engine.model).tensor(
            name, good.tensors[name].shape[-1]
        )
        with torch.no_grad():
            live.view(-1)[5] *= 1.01
        return proven(good)

    said["tampered norm"] = tampered("model.norm.weight")

    dispatch = vllm_worker.dispatch_cpu_unquantized_gemm
    vllm_worker.dispatch_cpu_unquantized_gemm = lambda *_, **__: None
    load(good)
    load(version(2))
    said["head as vLLM leaves it"] = worker.asyncrl_prove()[1]
    vllm_worker.dispatch_cpu_unquantized_gemm = dispatch
    images.close()
    sys.stdout.write(f"{json.dumps(said)}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
