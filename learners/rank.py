"""The other ranks of a learner: they do what rank 0 tells them, and know nothing of steps and versions themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import torch

from asyncrl.buffers.base import Buffer
from asyncrl.buffers.patience import patiently
from asyncrl.buffers.store import StoreAway
from asyncrl.config.identity import identity, identity_differences
from asyncrl.config.recipe import Recipe
from asyncrl.learners.checkpoint import MANIFEST, Checkpoint, CheckpointError, file_entry, load
from asyncrl.learners.commands import Begin, Gather, Train
from asyncrl.learners.parallel import Sharded
from asyncrl.learners.shares import as_message, share_groups
from asyncrl.learners.trainer import Trainer
from asyncrl.schema import decode_all

T = TypeVar("T")


async def follow(recipe: Recipe, buffer: Buffer, ranks: Sharded, *, model_path: Path) -> None:
    """Until rank 0 says that training is over. It is rank 0 that names what fails: whatever is raised here ends this
    process, which rank 0 sees or is told."""
    loop = asyncio.get_running_loop()
    # All in one thread, since which GPU is the current one is every thread's own; and not in the loop's, which takes
    # signals.
    with ThreadPoolExecutor(1, "rank", initializer=ranks.use_device) as thread:

        async def there(work: Callable[[], T]) -> T:
            return await loop.run_in_executor(thread, work)

        begin = await there(ranks.told)
        assert isinstance(begin, Begin)
        trainer = await there(lambda: _loaded(begin, recipe, ranks, model_path))
        while True:
            command = await there(ranks.told)
            if isinstance(command, Train):
                groups = await _fetched(buffer, command, ranks.rank, limit_s=recipe.run.no_progress_s)
                await there(partial(_train, trainer, command, groups, ranks))
            elif isinstance(command, Gather):
                await there(partial(_give, trainer, command, ranks))
            else:
                return


def _loaded(begin: Begin, recipe: Recipe, ranks: Sharded, model_path: Path) -> Trainer:
    """What rank 0 has loaded. Raises CheckpointError, ValueError: it cannot be the same here."""
    keys = identity_differences(begin.identity, identity(recipe))
    if keys:
        raise ValueError(
            f"its recipe has other values than rank 0's of: {', '.join(keys)}; give all ranks the same RECIPE and --set"
        )
    checkpoint = None if begin.checkpoint is None else _the_same(Path(begin.checkpoint), begin.digest)
    return Trainer.load(recipe, model_path, checkpoint, ranks, run_dir=Path(begin.run_dir))


def _the_same(folder: Path, digest: str) -> Checkpoint:
    """The checkpoint that rank 0 has found there, whatever host this is."""
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder}, which rank 0 goes on from, is not there: runs/ must be a folder that all hosts share"
        )
    if (found := file_entry(folder / MANIFEST).xxh3) != digest:
        raise CheckpointError(
            f"{folder} is another checkpoint than rank 0 goes on from ({MANIFEST} has xxh3 {found}, there {digest}): "
            "runs/ must be a folder that all hosts share"
        )
    return load(folder)


def _train(trainer: Trainer, command: Train, groups: list[pa.RecordBatch], ranks: Sharded) -> None:
    result = trainer.train_share(groups, shares=command.shares, version=command.lease.step)
    ranks.collect(as_message(result.seen), [])


def _give(trainer: Trainer, command: Gather, ranks: Sharded) -> None:
    match command.what:
        case "weights":
            ranks.gather(trainer.model, trainer.whole)
        case "served":
            ranks.give(trainer.model, getattr(torch, trainer.recipe.model.dtype))
        case "optimizer":
            trainer.resumable()


async def _fetched(buffer: Buffer, command: Train, rank: int, *, limit_s: float) -> list[pa.RecordBatch]:
    """This rank's groups of a step, and only those; an outage of the store is borne for `limit_s`."""
    lease, share = command.lease, share_groups(command.shares, rank)
    if not share:
        return []
    own = replace(
        lease, ordinals=tuple(lease.ordinals[n] for n in share), headers=tuple(lease.headers[n] for n in share)
    )
    return decode_all(await patiently(lambda: buffer.payloads(own), limit_s=limit_s, bears=StoreAway))
