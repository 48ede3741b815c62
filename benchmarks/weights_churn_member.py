"""A collector of `weights_churn`: the product's own, but for an engine that keeps the weights it is given, says what
they hash to, and takes no requests unless it is the one that samples."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asyncrl.buffers.base import Member
from asyncrl.buffers.store import open_store
from asyncrl.collectors import service
from asyncrl.collectors.engines.base import KvMode
from asyncrl.collectors.engines.simulated import SimulatedEngine
from asyncrl.config.recipe import Recipe
from asyncrl.staleness import Weights
from asyncrl.weights import collective_receiver, file
from asyncrl.weights.base import StagedWeights
from asyncrl.weights.delta_codec import Bytes
from asyncrl.weights.manifest import TensorSpec, combined_checksum


@dataclass(frozen=True, slots=True)
class Role:
    """What a member's process is told."""

    url: str
    recipe: Recipe
    name: str
    folder: Path  # NAME.served gets a line for each version served: lineage, version, the hash of its bytes
    samples: bool  # whether it takes tickets
    damaged: int  # in each transfer of this number and its multiples a bit flips; 0: in none
    checked: bool  # False, a control: what arrives is taken as it is


def serve(role: Role) -> None:
    """Be a collector until the run has ended, or SIGTERM."""
    torch.set_num_threads(1)
    with (role.folder / f"{role.name}.log").open("wb") as log:
        os.dup2(log.fileno(), 2)  # also what torch says, of peers that end
    logging.basicConfig()
    damage(role.damaged, checked=role.checked)
    with (role.folder / f"{role.name}.served").open("a", buffering=1) as served:

        def makers(recipe: Recipe, name: str, model_path: Path | None) -> Sequence[Callable[[], SimulatedEngine]]:
            return [lambda: Judged(f"{name}/0", served.write, samples=role.samples)]

        setattr(service, "engine_makers", makers)  # noqa: B010  # as an assignment it would be a type error
        asyncio.run(_collect(role))


async def _collect(role: Role) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    store = await open_store(role.url)
    try:
        buffer = await store.find_run(role.recipe.run.name)
        if buffer is None:
            raise ValueError(f"the store has no run {role.recipe.run.name!r}")
        member = Member(role.name, uuid.uuid4().hex)
        await service.collect(role.recipe, buffer, member, model_path=None, stop=stop)
    finally:
        await store.close()


class Judged(SimulatedEngine):
    """Serves real bytes, and reports their hash each time it has changed them."""

    def __init__(self, name: str, report: Callable[[str], object], *, samples: bool) -> None:
        super().__init__(name, slots=2, token_s=0.01, mean_tokens=5.0, cv=0.1, seed=0)
        self._report, self._samples = report, samples
        self._tensors: Mapping[str, torch.Tensor] = {}
        self._next: Mapping[str, torch.Tensor] = {}

    @property
    def free_slots(self) -> int:
        return super().free_slots if self._samples else 0

    async def stage(self, staged: StagedWeights) -> None:
        await super().stage(staged)
        self._next = staged.tensors

    async def activate(self, kv: KvMode = "keep", *, exchanged: Callable[[], None] | None = None) -> Weights:
        weights = await super().activate(kv, exchanged=exchanged)
        self._tensors, self._next = self._next, {}
        self._report(f"{weights.lineage} {weights.version} {combined_checksum(self._tensors.items())}\n")
        return weights


def damage(nth: int, *, checked: bool) -> None:
    """Flip a bit where the product is about to check what arrived, and check or not."""
    verify, reach = file.verify_tensors, collective_receiver.Hashes.reach
    arrived = 0

    def flipped(data: Bytes) -> None:
        nonlocal arrived
        arrived += 1
        if nth and arrived % nth == 0:
            data[len(data) // 2] ^= 1

    def read(tensors: Sequence[TensorSpec], image: Bytes, where: str) -> None:
        flipped(image)
        if checked:
            verify(tensors, image, where)

    def received(self: Any, end: int) -> None:
        if end == self._manifest.size:
            flipped(self._data)
        reach(self, end)

    setattr(file, "verify_tensors", read)  # noqa: B010
    setattr(collective_receiver.Hashes, "reach", received)  # noqa: B010
