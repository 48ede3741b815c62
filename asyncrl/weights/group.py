"""The process group of one roster, and the broadcast of one version through it: Gloo between CPUs, NCCL between GPUs.

The group is made directly, not by `init_process_group`: it is nobody's default group, has nothing to do with the one of
the learner's ranks, and a broken one is dropped and made anew. The bytes go in buckets, two at a time: while one is
broadcast, the one before is hashed by the receiver; on GPUs also copied from and to the host.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch._C._distributed_c10d import (  # torch.distributed has them too, but not for type checkers
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
)

from asyncrl.staleness import Weights
from asyncrl.weights.attempts import Attempt
from asyncrl.weights.base import WeightsError
from asyncrl.weights.memory import borrowed
from asyncrl.weights.reach import device_named
from asyncrl.weights.roster import Roster

BUCKET = 64 << 20
"""Bytes. Large enough that a broadcast's fixed cost (0.1 ms) is nothing, small enough that hashing the last bucket,
which nothing overlaps, is little against the whole, and that two of them fit beside a model on a GPU."""

AHEAD = 2
"""Broadcasts under way at once: the next one must be there when one ends."""


class Group:
    """Rank `rank` of `roster` and the learner. Creating it blocks until all are connected, at most `roster.limit_s`."""

    def __init__(self, roster: Roster, store: Store, rank: int, *, address: str, device: str) -> None:
        """`store`: where the members meet; `address`: this host's own, on which the others reach it; `device`: as in
        the `Place` of this process.

        Raises RuntimeError: somebody did not come, or there is no such device.
        """
        self.id = roster.group
        self._nccl = roster.backend == "nccl"
        found = device_named(device if self._nccl else "cpu")  # not the thread's default one
        if found is None:
            raise RuntimeError(f"this process sees no GPU {device}")
        self._device = found
        spare = AHEAD if self._nccl else 0
        self._spare = [torch.empty(BUCKET, dtype=torch.uint8, device=self._device) for _ in range(spare)]
        prefix = PrefixStore(mesh(roster.group), store)
        make = _nccl if self._nccl else _gloo
        self._backend = make(prefix, rank, len(roster.members) + 1, address, roster.limit_s)

    def send(self, epoch: int, weights: Weights, data: NDArray[np.uint8], *, limit_s: float) -> None:
        """Rank 0: broadcast `data`, the bytes of `weights`. Raises RuntimeError: a member has left or was too slow."""
        with self._works(limit_s) as works:
            works.start(torch.tensor([epoch, *weights, len(data)], device=self._device))
            for start in range(0, len(data), BUCKET):
                part = torch.from_numpy(borrowed(data[start : start + BUCKET]))
                if works.under_way == AHEAD:
                    works.finish()
                bucket = self._bucket(start, part)
                if bucket is not part:
                    bucket.copy_(part)
                works.start(bucket)
            while works.under_way:
                works.finish()
            if self._nccl:
                torch.cuda.synchronize(self._device)

    def receive(
        self, epoch: int, weights: Weights, into: torch.Tensor, arrived: Callable[[int], None], *, limit_s: float
    ) -> None:
        """Any other rank: receive `weights` into `into`, uint8 [bytes] on the CPU. `arrived` is called with the number
        of bytes that are there, while further ones come.

        Raises RuntimeError (a member has left or was too slow), WeightsError (other weights came).
        """
        with self._works(limit_s) as works:
            header = torch.empty(4, dtype=torch.int64, device=self._device)
            works.start(header)
            works.finish()
            expected = [epoch, *weights, into.numel()]
            if (found := header.tolist()) != expected:
                raise WeightsError(
                    f"the group is out of step: expected [epoch, lineage, version, bytes] {expected}, "
                    f"the learner sent {found}"
                )
            parts = deque(
                (start, into[start : start + BUCKET], self._bucket(start, into[start : start + BUCKET]))
                for start in range(0, into.numel(), BUCKET)
            )
            for _, _, bucket in list(parts)[:AHEAD]:
                works.start(bucket)
            while parts:
                start, part, bucket = parts.popleft()
                works.finish()
                if bucket is not part:
                    part.copy_(bucket)
                if len(parts) >= AHEAD:
                    works.start(parts[AHEAD - 1][2])
                arrived(start + part.numel())

    def abort(self) -> None:
        """End what is under way where it is needed: NCCL would keep the GPU busy. Gloo ends by its limit."""
        if self._nccl:
            self._backend.abort()

    def _bucket(self, start: int, part: torch.Tensor) -> torch.Tensor:
        """What is broadcast for `part`: itself, or on a GPU a spare that is free again."""
        return self._spare[start // BUCKET % AHEAD][: part.numel()] if self._nccl else part

    @contextmanager
    def _works(self, limit_s: float) -> Iterator[_Works]:
        """For the broadcasts of one version."""
        works = _Works(self._backend, limit_s)
        try:
            yield works
        except BaseException:
            # Whoever drops a backend's last reference waits for what is under way: perhaps the event loop, which gets
            # the error and, in its traceback, all of this. So a thread of its own keeps one until nothing is.
            Attempt(works.outlast, name="weights-group-ends")
            raise


class _Works:
    """Broadcasts under way, oldest first."""

    def __init__(self, backend: Any, limit_s: float) -> None:
        self._backend = backend
        self._options = BroadcastOptions()
        self._options.rootRank = self._options.rootTensor = 0
        self._options.timeout = timedelta(seconds=limit_s)
        self._works: deque[Any] = deque()

    @property
    def under_way(self) -> int:
        return len(self._works)

    def start(self, tensor: torch.Tensor) -> None:
        self._works.append(self._backend.broadcast([tensor], self._options))

    def finish(self) -> None:
        """Wait for the oldest."""
        self._works[0].wait()
        self._works.popleft()

    def outlast(self) -> None:
        """Wait until all have ended, well or by their limit."""
        while self._works:
            with suppress(RuntimeError):
                self._works.popleft().wait()


def mesh(group: int) -> str:
    """The prefix of a group's own keys in the store."""
    return f"{group}/mesh"


def _gloo(store: Store, rank: int, size: int, address: str, limit_s: float) -> Any:
    gloo: Any = ProcessGroupGloo  # its options are missing in its stub
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=limit_s)
    return gloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, address: str, limit_s: float) -> Any:
    """Which network it takes is NCCL's own setting (NCCL_SOCKET_IFNAME), not `address`."""
    from torch._C._distributed_c10d import ProcessGroupNCCL  # builds for the CPU lack it

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=limit_s)
    # By default a lost peer ends the whole process. Read once, here: other groups keep what they have.
    variable = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(variable)
    os.environ[variable] = "0"
    try:
        return ProcessGroupNCCL(store, rank, size, options)
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
