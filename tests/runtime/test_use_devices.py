"""A process that is told which GPUs it has: its environment says so, and torch has to find them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from asyncrl.config.devices import Placement
from asyncrl.config.errors import RecipeError
from asyncrl.config.loading import load_recipe
from asyncrl.runtime.processes import use_devices
from asyncrl.runtime.supervisor import Supervisor


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


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("placement", "said"),
    [
        (Placement((2,), (3,)), "learner.devices is [2], of which torch finds 0 here (CUDA_VISIBLE_DEVICES=1002)"),
        (Placement((), (3, 5)), "collector.devices is [3, 5], of which torch finds 0 here (CUDA_VISIBLE_DEVICES=1003,"),
    ],
)
async def test_a_run_tells_each_of_its_processes_what_was_planned_for_it(
    tmp_path: Path, placement: Placement, said: str
) -> None:
    """There are no such GPUs, so the process that is told of them says what it was told."""
    (tmp_path / "logs").mkdir()
    recipe = load_recipe("tiny-reverse", sections={"collector": {"engines": 2}}).recipe
    supervisor = Supervisor(recipe, tmp_path, placement=placement, resume=False)
    async with asyncio.timeout(100):
        assert await supervisor.run(asyncio.Event()) == 2
    assert supervisor.failure.startswith(said), supervisor.failure
