"""A run by hand, against a store that can be put back to any earlier moment: collector, learner, and what they know."""

from __future__ import annotations

import copy
import uuid
from pathlib import Path
from typing import Any

from asyncrl.buffers.archive import Archive
from asyncrl.buffers.base import Buffer, GroupHeader, Lease, Member
from asyncrl.buffers.limits import Limits
from asyncrl.buffers.memory import MemoryBuffer
from asyncrl.buffers.store import NoRun, Store, StoreAway
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


class Forgetful:
    """A store whose moments are kept: it `goes_back` to one of them, or `loses_everything`."""

    def __init__(self) -> None:
        self.limits = LIMITS
        self.gone = False
        self.away = 0  # calls that it does not answer from now on
        self.answers_lost: set[int] = set()  # of the calls from now on, by their number
        self.moments: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        """An operation, of whatever is there when it is called."""

        async def operation(*arguments: Any, **options: Any) -> Any:
            if self.away:
                self.away -= 1
                raise StoreAway("nobody answers")
            if self.gone:
                raise NoRun("there is no run of this name")
            answer = await getattr(self.buffer, name)(*arguments, **options)
            lost = 0 in self.answers_lost
            self.answers_lost = {n - 1 for n in self.answers_lost if n > 0}
            if lost:
                raise StoreAway("nobody answers any more")
            return answer

        return operation


class ForgetfulMemory(Forgetful):
    """`memory://`."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = MemoryBuffer("forgetful", LIMITS, clock=lambda: 0.0)

    async def remembers(self) -> None:
        self.moments.append(copy.deepcopy(self.buffer.model))

    async def goes_back(self, moment: int) -> None:
        await self.recreate()
        self.buffer._model = copy.deepcopy(self.moments[moment])

    async def loses_everything(self) -> None:
        self.gone = True

    async def recreate(self) -> None:
        self.gone = False
        self.buffer = MemoryBuffer("forgetful", LIMITS, clock=lambda: 0.0)


class ForgetfulServer(Forgetful):
    """A run in a real store; a moment is the content of its keys."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store

    async def create(self) -> None:
        name = f"forgetful-{uuid.uuid4().hex}"
        self.buffer = await self.store.create_run(name, recipe={}, recipe_hash="h", limits=LIMITS)

    async def remembers(self) -> None:
        client = self.store.client
        self.moments.append({key: await client.dump(key) for key in await self._keys()})

    async def goes_back(self, moment: int) -> None:
        await self.loses_everything()
        self.gone = False
        for key, content in self.moments[moment].items():
            await self.store.client.restore(key, 0, content)

    async def loses_everything(self) -> None:
        self.gone = True
        if keys := await self._keys():
            await self.store.client.delete(*keys)

    async def recreate(self) -> None:
        self.gone = False
        await self.store.create_run(self.buffer.run, recipe={}, recipe_hash="h", limits=LIMITS)

    async def _keys(self) -> list[bytes]:
        """Without the mailboxes, which go away by themselves."""
        found = [key async for key in self.store.client.scan_iter(match=f"{self.buffer.prefix}:*", count=1000)]
        return [key for key in found if b":mail:" not in key]


class HandRun:
    """Makes steps through `buffer`, a learner's view of `store`; knows what the weights contain."""

    def __init__(self, store: Any, parts: Parts) -> None:
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
        """The collectors leave, and another one comes, takes what it gets, and hands over, all of the newest weights.
        Every other one keeps its last ticket in work."""
        for n in range(self.collectors):
            await buffer.leave(Member(f"c{n + 1}", f"c{n + 1}"))
        self.collectors += 1
        member = Member(f"c{self.collectors}", f"c{self.collectors}")
        await buffer.join(member, {})
        await buffer.beat(member, serving=self.own, checksum="", progress={}, info={})
        tickets = await buffer.tickets(member, seq=1, want=8, wait_s=0.0)
        for ticket in tickets[: len(tickets) - self.collectors % 2]:
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
