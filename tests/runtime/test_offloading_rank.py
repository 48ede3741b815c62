"""One rank that keeps its weights in host memory has a process group of its own; without a GPU it has none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from torch import distributed

from asyncrl.config.recipe import Learner, Recipe
from asyncrl.learners.parallel import ALONE, Sharded
from asyncrl.runtime import ranks
from asyncrl.runtime.ranks import ranks_of

OFFLOADING = Recipe(learner=Learner(cpu_offload=True))


@pytest.mark.asyncio
@pytest.mark.parametrize("gpu", [False, True])
async def test_one_rank_that_offloads_meets_itself_if_there_is_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    monkeypatch.setattr(ranks, "_has_gpu", lambda: gpu)
    async with ranks_of(OFFLOADING, url="", folder=tmp_path, stop=asyncio.Event()) as found:
        assert isinstance(found, Sharded) is gpu
        assert (found is ALONE) is not gpu
        assert distributed.is_initialized() is gpu
        assert found is not None
        assert found.total([1.0, 2.0]) == [1.0, 2.0]
    assert not distributed.is_initialized()
