"""What vLLM is started with, before there is a vLLM."""

from __future__ import annotations

from asyncrl.collectors.engines.vllm_start import ON_A_CPU, chosen


def test_engines_of_a_collector_are_dealt_out_to_the_gpus_that_it_sees() -> None:
    found = [chosen({"model": "m"}, cpu=False, gpus=2, place=place) for place in range(4)]
    assert [one["device_ids"] for one in found] == [[0], [1], [0], [1]]
    assert {one["model"] for one in found} == {"m"}


def test_on_a_cpu_there_are_no_devices_and_what_is_given_wins() -> None:
    found = chosen({"kv_cache_memory_bytes": 7, "max_model_len": None}, cpu=True, gpus=0, place=3)
    assert found == {**ON_A_CPU, "kv_cache_memory_bytes": 7}


def test_on_a_platform_whose_devices_torch_does_not_count_vllm_chooses() -> None:
    assert chosen({"dtype": "bfloat16", "enforce_eager": None}, cpu=False, gpus=0, place=1) == {"dtype": "bfloat16"}
