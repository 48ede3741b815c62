"""A run by hand, against a store that can be put back to any earlier moment: collector, learner, and what they know."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from asyncrl.buffers.archive import Archive
from asyncrl.buffers.base import Buffer, GroupHeader, Lease, Limits, Member
from asyncrl.buffers.memory import MemoryBuffer
from asyncrl.buffers.store import NoRun
from asyncrl.schema import digest
from asyncrl.staleness import Weights

LIMITS = Limits(max_age=1, groups_per_step=2, max_steps=1000, group_bytes=10, max_bytes=10_000)


class Parts(Archive):
    """An archive whose parts are in memory."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"))
        self.trained: dict[Weights, list[tuple[int, int]]] = {}

    def tickets(self, step: Weights) -> list[tuple[int, int]]:
        if step not in self.trained:
            raise FileNotFoundError(f"no part of lineage {step.lineage} step {step.version}")
        return self.trained[step]


class ForgetfulStore:
    """`memory://`, whose moments are kept: `goes_back` to one of them, or `loses_everything`."""

    def __init__(self) -> None:
        self.time = 0.0
        self.limits = LIMITS
        self.now: MemoryBuffer | None = self._made()
        self.moments: list[Any] = []

    def _made(self) -> MemoryBuffer:
        return MemoryBuffer("forgetful", LIMITS, clock=lambda: self.time)

    def __getattr__(self, name: str) -> Any:
        """An operation, of whatever is there when it is called."""

        async def operation(*arguments: Any, **options: Any) -> Any:
            if self.now is None:
                raise NoRun("there is no run of this name")
            return await getattr(self.now, name)(*arguments, **options)

        return operation

    def remembers(self) -> None:
        assert self.now is not None
        self.moments.append(copy.deepcopy(self.now.model))

    def goes_back(self, moment: int) -> None:
        self.now = self._made()
        self.now._model = copy.deepcopy(self.moments[moment])

    def loses_everything(self) -> None:
        self.now = None

    async def recreate(self) -> None:
        self.now = self._made()


class HandRun:
    """Makes steps through `buffer`, a learner's view of `store`; knows what the weights contain."""

    def __init__(self, store: ForgetfulStore, parts: Parts) -> None:
        self.store, self.parts = store, parts
        self.forks: dict[int, tuple[int, int]] = {}
        self.own = Weights(0, 0)
        self.contained: list[tuple[int, ...]] = []  # ordinals of each step of the branch
        self.collectors = 0
        self.recovered: list[Any] = []

    async def starts(self, buffer: Buffer, version: int) -> None:
        """A new lineage, from a checkpoint of `version` on the current branch."""
        parent = None
        if version:
            lineage = self.own.lineage
            while self.forks[lineage][1] > version or (
                self.forks[lineage][1] == version and self.forks[lineage][0] > 0
            ):
                lineage = self.forks[lineage][0]
            parent = Weights(lineage, version)
        lineage = await buffer.new_lineage(parent=parent, limits=LIMITS)
        self.forks[lineage] = tuple(parent or (0, 0))
        self.own, self.contained = Weights(lineage, version), self.contained[:version]

    async def generates(self, buffer: Buffer) -> None:
        """Another collector comes, takes what it gets, and hands it over, all of the newest weights."""
        self.collectors += 1
        member = Member(f"c{self.collectors}", f"c{self.collectors}")
        await buffer.join(member, {})
        await buffer.beat(member, serving=self.own, checksum="", progress={}, info={})
        for ticket in await buffer.tickets(member, seq=1, want=8, wait_s=0.0):
            header = GroupHeader(
                ordinal=ticket.ordinal,
                attempt=ticket.attempt,
                weights=self.own,
                oldest=self.own.version,
                newest=self.own.version,
                spans=(self.own,),
                tokens=1,
                seconds=1.0,
                digest=digest(b"group"),
            )
            await buffer.put(member, header, b"group")

    async def leases(self, buffer: Buffer) -> Lease:
        """The batch of the next step."""
        for _ in range(4):
            answer = await buffer.lease(*self.own, wait_s=0.0)
            if isinstance(answer, Lease):
                return answer
            await self.generates(buffer)
        raise AssertionError(f"there is no batch for {self.own}: {answer}")

    async def commits(self, buffer: Buffer, lease: Lease) -> None:
        """The weights learn from a batch; its part is written; it is committed."""
        assert lease.step == self.own.version
        self.parts.trained[self.own] = [(header.ordinal, header.attempt) for header in lease.headers]
        commit = await buffer.commit(*self.own)
        self.contained.append(lease.ordinals)
        assert commit.version == self.own.version + 1
        self.own = Weights(self.own.lineage, commit.version)
