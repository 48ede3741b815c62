"""The argument by which vLLM is told its GPU is one that this vLLM has; on a CPU nothing more can be tried."""

from __future__ import annotations

from vllm import AsyncEngineArgs

from asyncrl.collectors.engines.vllm_start import chosen


def test_vllm_has_the_argument_that_names_a_gpu() -> None:
    given = chosen({}, cpu=False, gpus=2, place=3)
    assert given == {"device_ids": [1]}
    assert given.keys() <= AsyncEngineArgs.__dataclass_fields__.keys()
