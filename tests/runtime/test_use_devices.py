"""A process that is told which GPUs it has: its environment says so, and torch has to find them."""

from __future__ import annotations

import os

import pytest

from asyncrl.config.errors import RecipeError
from asyncrl.runtime.processes import use_devices


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(str(1000 + number) for number in range(8)))
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def test_gpus_that_torch_does_not_find_are_an_error_with_what_it_was_told() -> None:
    with pytest.raises(
        RecipeError, match=r"collector.devices is \[3, 5\], of which torch finds 0 here \(.*=1003,1005\)"
    ):
        use_devices("collector.devices", [3, 5])


def test_a_process_that_is_told_nothing_sees_what_it_saw() -> None:
    before = dict(os.environ)
    use_devices("learner.devices", None)
    assert dict(os.environ) == before
