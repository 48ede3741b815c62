"""The other ranks of a learner: they do what rank 0 tells them, and know nothing of steps and versions themselves."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import torch

from asyncrl.buffers.base import Buffer
from asyncrl.buffers.patience import patiently
from asyncrl.buffers.store import StoreAway
from asyncrl.config.recipe import Recipe
from asyncrl.learners.checkpoint import load
from asyncrl.learners.commands import Begin, Gather, Train
from asyncrl.learners.parallel import Sharded
from asyncrl.learners.shares import as_message, share_groups
from asyncrl.learners.trainer import Trainer
from asyncrl.schema import decode_all


async def follow(recipe: Recipe, buffer: Buffer, ranks: Sharded, *, model_path: Path) -> None:
    """Until rank 0 says that training is over. It is rank 0 that names what fails: whatever is raised here ends this
    process, which rank 0 sees."""
    begin = ranks.told()
    assert isinstance(begin, Begin)
    checkpoint = None if begin.checkpoint is None else load(Path(begin.checkpoint))
    trainer = Trainer.load(recipe, model_path, checkpoint, ranks)
    while True:
        command = await asyncio.to_thread(ranks.told)
        if isinstance(command, Train):
            groups = await _fetched(buffer, command, ranks.rank, limit_s=recipe.run.no_progress_s)
            result = trainer.train_share(groups, shares=command.shares, version=command.lease.step)
            ranks.collect(as_message(result.seen), [])
        elif isinstance(command, Gather):
            match command.what:
                case "weights":
                    ranks.gather(trainer.model, trainer.whole)
                case "served":
                    ranks.give(trainer.model, getattr(torch, recipe.model.dtype))
                case "optimizer":
                    trainer.resumable()
        else:
            return


async def _fetched(buffer: Buffer, command: Train, rank: int, *, limit_s: float) -> list[pa.RecordBatch]:
    """This rank's groups of a step, and only those; an outage of the store is borne for `limit_s`."""
    lease, share = command.lease, share_groups(command.shares, rank)
    if not share:
        return []
    own = replace(
        lease, ordinals=tuple(lease.ordinals[n] for n in share), headers=tuple(lease.headers[n] for n in share)
    )
    return decode_all(await patiently(lambda: buffer.payloads(own), limit_s=limit_s, bears=StoreAway))
