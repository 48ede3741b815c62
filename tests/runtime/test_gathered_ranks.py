"""A rank that is lost while weights are gathered from it ends the learner, with its name."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
import torch

from asyncrl.config.recipe import Learner, Recipe, Run
from asyncrl.learners import gathering
from asyncrl.learners.lost import RankLost
from asyncrl.learners.parallel import Sharded, in_folder
from asyncrl.runtime import children
from asyncrl.runtime.ranks import RankProcesses
from asyncrl.staleness import Weights
from asyncrl.weights.image import Images

LIMIT_S = 90.0
BUCKET_BYTES = 256

RANK = """
import os, pathlib, signal, sys
import torch
from asyncrl.learners import gathering
from asyncrl.learners.parallel import Sharded, in_folder
come = pathlib.Path(sys.argv[1])
come.touch()
ranks = Sharded(1, 2, meeting=in_folder(come.parent, 1, 2), step_s=60.0, silence_s=60.0)
model = torch.nn.Linear(64, 64)
ranks.shard(model)
gathering.BUCKET_BYTES, made, make = 256, [], gathering.buffer
def buffer(*arguments):
    made.append(1)
    if len(made) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return make(*arguments)
gathering.buffer = buffer
ranks.give(model, torch.float32)
"""


@pytest.mark.faults
@pytest.mark.timeout(200)
@pytest.mark.asyncio
async def test_a_rank_that_is_killed_while_weights_are_gathered_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def command(argv: list[str]) -> list[str]:
        meeting, rank = argv[argv.index("--meeting") + 1], argv[argv.index("--rank") + 1]
        return [sys.executable, "-c", RANK, f"{meeting}/{rank}", rank]

    monkeypatch.setattr(children.tether, "command", command)
    monkeypatch.setattr(gathering, "BUCKET_BYTES", BUCKET_BYTES)
    (tmp_path / "logs").mkdir()
    (tmp_path / "meeting").mkdir()
    processes = RankProcesses(2, folder=tmp_path, meeting=tmp_path / "meeting", limit_s=LIMIT_S)
    images = Images("gathered", folder=tmp_path)
    try:
        await processes.start(Recipe(run=Run(name="ranks"), learner=Learner(ranks=2)), "redis://nowhere")
        assert await asyncio.wait_for(processes.met(asyncio.Event()), LIMIT_S)
        ranks = await asyncio.to_thread(
            Sharded,
            0,
            2,
            meeting=in_folder(tmp_path / "meeting", 0, 2),
            step_s=LIMIT_S,
            silence_s=LIMIT_S,
            watch=processes,
        )
        model = torch.nn.Linear(64, 64)
        ranks.shard(model)  # type: ignore[arg-type]  # a module is all it needs
        source = ranks.stream(model, torch.float32)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError) as failed:
            await asyncio.to_thread(images.write, Weights(1, 0), source, tied={})
        cause = await ranks.cause(failed.value)
        assert isinstance(cause, RankLost)
        assert "learner rank 1 (process" in str(cause)
        assert "was killed by SIGKILL" in str(cause)
        assert images.newest is None
        await asyncio.to_thread(ranks.close)
    finally:
        await processes.kill()
        images.close()
