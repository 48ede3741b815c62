"""What keeps asyncrl from using a vLLM server is found before anything is sampled; `tests/vllm` has real servers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from asyncrl.collectors.engines.vllm_about import About, unfit

GOOD = About(
    memory="m",
    transfer="asyncrl",
    logprobs_mode="processed_logprobs",
    dtype="bfloat16",
    head_dtype="float32",
    slots=64,
    max_length=4096,
    vocabulary=100,
    workers=1,
    api_processes=1,
    max_logprobs=-1,
    own_ends=False,
    transforms=(),
    cpu=False,
    chunked_prefill=True,
    updating=False,
)
WANTED: dict[str, Any] = {"memory": "m", "dtype": "bfloat16", "slots": 64, "max_length": 4096}

FAULTS = {
    "memory": ("another host", "as one user, in one container"),
    "transfer": ("nccl", """--weight-transfer-config '{"backend": "asyncrl"}'"""),
    "logprobs_mode": ("raw_logprobs", "--logprobs-mode processed_logprobs"),
    "dtype": ("float32", "--dtype bfloat16"),
    "head_dtype": ("bfloat16", """--hf-overrides '{"head_dtype": "float32"}'"""),
    "slots": (63, "--max-num-seqs 64, or set collector.engine.slots to 63"),
    "max_length": (4095, "--max-model-len 4096"),
    "workers": (2, "on one GPU"),
    "api_processes": (2, "--api-server-count 1"),
    "transforms": (("--quantization", "--enable-lora"), "without --quantization, --enable-lora"),
    "cpu": (True, "--no-enable-chunked-prefill"),
}


def test_a_server_that_has_what_is_asked_for_fits() -> None:
    assert unfit(GOOD, **WANTED) == []
    assert unfit(GOOD, **{**WANTED, "slots": 1, "max_length": None}) == []
    assert unfit(msgspec.structs.replace(GOOD, cpu=True, chunked_prefill=False), **WANTED) == []


@pytest.mark.parametrize("field", FAULTS)
def test_what_does_not_fit_is_named_with_the_option_that_helps(field: str) -> None:
    value, fix = FAULTS[field]
    (fault,) = unfit(msgspec.structs.replace(GOOD, **{field: value}), **WANTED)
    assert fix in fault


def test_all_that_does_not_fit_is_said_at_once() -> None:
    bad = msgspec.structs.replace(GOOD, **{field: value for field, (value, _) in FAULTS.items()})
    assert len(unfit(bad, **WANTED)) == len(FAULTS)
