"""Random schedules of a whole run, against one or several buffers at once, with every rule of the contract checked.

The driver plays collectors (that lag, crash, come back, fall back behind their promise), one learner (that skips steps,
crashes, resumes from a checkpoint with another batch size) and the clock. Every reply of every buffer must be the same,
and after every act the contract's sums must hold on the reference model.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrl.buffers.audit import ledger_problems
from asyncrl.buffers.base import (
    BufferError,
    GroupHeader,
    Lease,
    Member,
    State,
    Ticket,
    TicketRow,
    UnknownMember,
)
from asyncrl.buffers.limits import Limits
from asyncrl.buffers.memory import MemoryBuffer
from asyncrl.buffers.reference.common import CLOCK_STEP_S
from asyncrl.buffers.reference.model import Model
from asyncrl.schema import digest
from asyncrl.staleness import Lineages, Weights
from tests.buffer.rules import Broken, check_batch, check_model, check_uses, differences

KEPT_CHECKPOINTS = 2
LimitsOf = Callable[[random.Random, str], Limits]


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now

    async def passes(self, buffer: Any, seconds: float) -> None:
        """Time passes while others use the store: between two acts a few seconds at most, as in a run."""
        while seconds > 0:
            self.now += min(seconds, CLOCK_STEP_S)
            seconds -= CLOCK_STEP_S
            await buffer.stats()


@dataclass
class Collector:
    """What a collector knows: what it serves, what it holds, and the weights each of its groups has tokens of."""

    member: Member
    serving: Weights | None = None
    seq: int = 0
    waiting: bool = False
    work: dict[tuple[int, int], list[Weights]] = field(default_factory=dict)
    lag: int = 0


@dataclass
class Faults:
    """How often what goes wrong, per act."""

    crash: float = 0.03
    learner: float = 0.01
    skip: float = 0.05
    fail: float = 0.05
    fallback: float = 0.02
    lost_reply: float = 0.1
    quarantine: float = 0.03


@dataclass
class Driver:
    buffers: list[Any]
    clock: Clock
    rng: random.Random
    limits: Limits
    faults: Faults = field(default_factory=Faults)
    collectors: list[Collector] = field(default_factory=list)
    lineage: int = 0
    tree: Lineages = field(default_factory=lambda: Lineages({}))
    version: int = 0
    checkpoints: list[Weights] = field(default_factory=list)  # newest last
    checkpoint_every: int = 3
    announced: Weights | None = None
    trained: dict[int, list[Weights]] = field(default_factory=dict)  # ordinal -> (lineage, step) of every use
    archive: dict[int, TicketRow] = field(default_factory=dict)  # rows that have left the store
    tokens_of: dict[tuple[int, int], list[Weights]] = field(default_factory=dict)  # (ordinal, attempt) -> spans put
    born: int = 0
    acts: int = 0

    async def every(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Call the same operation on all buffers; the same answer, or the same kind of refusal."""
        answers: list[Any] = []
        for buffer in self.buffers:
            try:
                answers.append(await getattr(buffer, operation)(*args, **kwargs))
            except BufferError as error:
                answers.append(error)
        for answer in answers[1:]:
            same = type(answer) is type(answers[0]) if isinstance(answer, BufferError) else answer == answers[0]
            if not same:
                raise Broken(f"{operation}{args}{kwargs}: {differences(answers[0], answer)}")
        if isinstance(answers[0], BufferError):
            raise answers[0]
        return answers[0]

    # --- collectors -------------------------------------------------------------------------------------------------

    async def new_collector(self, name: str) -> Collector:
        self.born += 1
        collector = Collector(Member(name, f"i{self.born:06d}"), lag=self.rng.choice([0, 0, 0, 1, 2]))
        await self.every("join", collector.member, {"host": name})
        self.collectors = [c for c in self.collectors if c.member.name != name] + [collector]
        return collector

    async def activate(self, collector: Collector) -> None:
        """Serve the newest announcement; work with tokens of dead weights is dropped, as collectors must."""
        if self.announced is None or collector.serving == self.announced:
            return
        collector.serving = self.announced
        for key, spans in list(collector.work.items()):
            if not all(self._survives(s) for s in spans):
                del collector.work[key]
                await self.every(
                    "fail", collector.member, *key, kind="cancelled", reason="rewound", tokens=1, seconds=1.0
                )

    def _survives(self, name: Weights) -> bool:
        """By the driver's own family tree: the buffers' may be the one with the guard removed."""
        return self.tree.is_ancestor(name, self.lineage)

    async def beat(self, collector: Collector) -> None:
        progress = {key: len(spans) + int(self.clock.now) for key, spans in collector.work.items()}
        reply = await self.every(
            "beat", collector.member, serving=collector.serving, checksum="c", progress=progress, info={"n": 1}
        )
        for key in reply.revoked:
            collector.work.pop(key, None)
        if self.rng.random() < 0.5:
            await self.activate(collector)

    async def ask(self, collector: Collector) -> None:
        if not collector.waiting:
            collector.seq += 1
        want = self.rng.randint(1, 3)
        granted: list[Ticket] = await self.every("tickets", collector.member, seq=collector.seq, want=want, wait_s=0.0)
        if self.rng.random() < self.faults.lost_reply:
            again = await self.every("tickets", collector.member, seq=collector.seq, want=want, wait_s=0.0)
            if again != granted:
                raise Broken(f"asked again for {granted}, got {again}")
        collector.waiting = not granted
        for ticket in granted:
            assert ticket.issued_for is not None
            collector.work[(ticket.ordinal, ticket.attempt)] = [ticket.issued_for]

    async def sample(self, collector: Collector) -> None:
        """Running groups get tokens of what is served now: a span more if it changed."""
        for spans in collector.work.values():
            if collector.serving is not None and spans[-1] != collector.serving and self.rng.random() < 0.5:
                spans.append(collector.serving)

    async def put(self, collector: Collector) -> None:
        if not collector.work:
            return
        key = self.rng.choice(sorted(collector.work))
        spans = collector.work.pop(key)
        if self.rng.random() < self.faults.fallback and spans[0].version > 0:
            spans = [Weights(spans[0].lineage, spans[0].version - 1), *spans]
        payload = self.rng.randbytes(self.rng.randint(1, self.limits.group_bytes))
        header = GroupHeader(
            ordinal=key[0],
            attempt=key[1],
            weights=max(spans),
            oldest=min(s.version for s in spans),
            newest=max(s.version for s in spans),
            spans=tuple(dict.fromkeys(spans)),
            tokens=10 * len(spans),
            seconds=2.0,
            digest=digest(payload),
            reward=0.5,
            length=10.0,
        )
        answer = await self.every("put", collector.member, header, payload)
        if self.rng.random() < self.faults.lost_reply:
            again = await self.every("put", collector.member, header, payload)
            if again != {"held": "duplicate"}.get(answer, answer):
                raise Broken(f"put again after {answer!r}: {again!r}")
        if answer == "held":
            self.tokens_of[key] = spans

    async def fail(self, collector: Collector) -> None:
        if collector.work:
            key = self.rng.choice(sorted(collector.work))
            del collector.work[key]
            kind = self.rng.choice(["data", "filtered", "infrastructure", "cancelled"])
            await self.every(
                "fail", collector.member, *key, kind=kind, reason=f"for_{kind}", tokens=3, seconds=1.0, length=2.0
            )

    # --- the learner ------------------------------------------------------------------------------------------------

    async def start_learner(self, parent: Weights | None) -> None:
        self.lineage = await self.every("new_lineage", parent=parent, limits=self.limits)
        self.version = parent.version if parent else 0
        self.tree.forks[self.lineage] = tuple(parent) if parent else (0, 0)
        self.checkpoints = [c for c in self.checkpoints if parent and c.version <= parent.version]
        if parent is None:
            self.archive.clear()
        await self.publish()

    async def publish(self) -> None:
        self.announced = Weights(self.lineage, self.version)
        await self.every("announce", self.announced, {"transport": "none"})

    async def step(self) -> bool:
        """One try at a step; False if the learner has to wait."""
        answer = await self.every("lease", self.lineage, self.version, wait_s=0.0)
        if not isinstance(answer, Lease) or not answer.ordinals:
            return False
        if self.rng.random() < 0.05:
            await self.every("release", self.lineage, self.version)
            answer = await self.every("lease", self.lineage, self.version, wait_s=0.0)
            if not isinstance(answer, Lease):
                raise Broken(f"released step {self.version} cannot be leased again: {answer}")
        if self.rng.random() < self.faults.quarantine:
            bad = [n for n in answer.ordinals if self.rng.random() < 0.5]
            await self.every("quarantine", self.lineage, self.version, bad, "corrupt")
            return False
        check_batch(answer, Weights(self.lineage, self.version), self.limits, self.tokens_of, survives=self._survives)
        payloads = await self.every("payloads", answer)
        if len(payloads) != len(answer.ordinals):
            raise Broken(f"{len(payloads)} payloads for {len(answer.ordinals)} tickets")
        commit = await self.every("commit", self.lineage, self.version, skipped=self.rng.random() < self.faults.skip)
        if self.rng.random() < self.faults.lost_reply:
            again = await self.every("commit", self.lineage, self.version)
            if (again.version, again.repeated) != (commit.version, True):
                raise Broken(f"commit again: {again}")
        for ordinal in answer.ordinals:
            self.trained.setdefault(ordinal, []).append(Weights(self.lineage, self.version))
        self.version = commit.version
        if self.version % self.checkpoint_every == 0:
            self.checkpoints = [*self.checkpoints, Weights(self.lineage, self.version)][-KEPT_CHECKPOINTS:]
            oldest = self.checkpoints[0].version
            await self.every("checkpointed", self.lineage, self.version, oldest=oldest)
            settled: list[TicketRow] = await self.every("settled", self.lineage, limit=self.rng.randint(1, 9))
            await self.every("archived", self.lineage, [row.ordinal for row in settled])
            for row in settled:
                if row.ordinal in self.archive:
                    raise Broken(f"ticket {row.ordinal} leaves for the archive twice")
                self.archive[row.ordinal] = row
        if self.announced is None or self.version >= self.announced.version + self.limits.publish_every:
            await self.publish()
        return True

    # --- schedules --------------------------------------------------------------------------------------------------

    async def act(self) -> None:
        rng = self.rng
        self.clock.now += rng.choice([0.0, 0.0, 1.0, 2.0])
        collector = rng.choice(self.collectors)
        try:
            await self.one_of_many(collector, rng.random())
        except UnknownMember:  # it was silent for too long and has been given up: it comes back as a new incarnation
            await self.new_collector(collector.member.name)
        await self.check()

    async def one_of_many(self, collector: Collector, dice: float) -> None:
        faults = self.faults
        if dice < faults.crash:
            await self.new_collector(collector.member.name)
        elif dice < faults.crash + faults.learner:
            await self.crash_learner()
        elif dice < 0.25:
            await self.beat(collector)
        elif dice < 0.45:
            await self.ask(collector)
        elif dice < 0.55:
            await self.sample(collector)
        elif dice < 0.75:
            await self.put(collector)
        elif dice < 0.75 + faults.fail:
            await self.fail(collector)
        else:
            await self.step()

    async def crash_learner(self) -> None:
        """A learner dies and another resumes, mostly from the newest checkpoint, with a batch size of its own."""
        candidates = [None, *self.checkpoints]
        parent = candidates[-1] if self.rng.random() < 0.7 else self.rng.choice(candidates)
        B = max(1, self.limits.groups_per_step + self.rng.choice([-1, 0, 0, 1]))
        need = (self.limits.max_age + 1) * B * self.limits.group_bytes
        fresh = min(self.limits.fresh_per_step, B)
        max_bytes = max(self.limits.max_bytes, need)
        self.limits = replace(self.limits, groups_per_step=B, max_bytes=max_bytes, fresh_per_step=fresh)
        await self.start_learner(parent)

    async def run(self, acts: int) -> None:
        for name in ("a", "b", "c")[: self.rng.randint(1, 3)]:
            await self.new_collector(name)
        await self.start_learner(None)
        for _ in range(acts):
            if self.version >= self.limits.max_steps:
                break
            await self.act()
        await self.drain()

    async def drain(self) -> None:
        """Without further faults the run must come to its end: anything else is a deadlock."""
        self.faults = Faults(0, 0, 0, 0, 0, 0, 0)
        idle = 0
        while self.version < self.limits.max_steps:
            moved = False
            for collector in list(self.collectors):
                try:
                    moved = await self.serve(collector) or moved
                except UnknownMember:
                    await self.new_collector(collector.member.name)
            moved = await self.step() or moved
            await self.check()
            self.clock.now += 1.0
            idle = 0 if moved else idle + 1
            if idle > 20:
                model = self.buffers[0].model
                raise Broken(
                    f"deadlock at V {self.version}: {model.counts()}, dues {model.dues}, k {self.limits.max_age}"
                )
        live = sum(self.buffers[0].model.counts()[s] for s in (State.ISSUED, State.HELD, State.LEASED, State.RETURNED))
        if live:
            raise Broken(f"{live} tickets are live after the last commit")

    async def serve(self, collector: Collector) -> bool:
        """A healthy collector's round: newest weights, all tickets it can get, all of them put."""
        await self.activate(collector)
        await self.beat(collector)
        await self.ask(collector)
        had_work = bool(collector.work)
        while collector.work:
            await self.put(collector)
        return had_work

    # --- rules ------------------------------------------------------------------------------------------------------

    async def check(self) -> None:
        self.acts += 1
        model: Model = self.buffers[0].model
        check_model(model)
        check_uses(model, self.trained, self.archive, survives=self._survives)
        if len(self.buffers) > 1:
            await self.every("snapshot")
        if self.acts % 10 == 0 and (problems := ledger_problems(*await self.buffers[0].snapshot(), self.limits)):
            raise Broken(f"audit: {problems}")


def random_limits(rng: random.Random, over_age: str) -> Limits:
    k, B = rng.choice([0, 0, 1, 1, 2, 4]), rng.choice([1, 2, 3, 4, 5])
    group_bytes = 50
    return Limits(
        max_age=k,
        groups_per_step=B,
        max_steps=rng.randint(4, 12),
        over_age=over_age,  # type: ignore[arg-type]
        lookahead=rng.choice([1.0, 1.5, 2.0]),
        group_bytes=group_bytes,
        max_bytes=(k + 1) * B * group_bytes + rng.choice([0, 0, 200, 10_000]),
        member_timeout_s=30.0,
        ticket_progress_s=40.0,
        no_progress_s=600.0,
        max_uses=rng.choice([1, 1, 1, min(2, k + 1), k + 1]),
        group_size=2,
    )


def fresh_limits(rng: random.Random, over_age: str) -> Limits:
    """Groups of several uses, with a share of fresh ones in each batch; weights are not always published."""
    limits = random_limits(rng, over_age)
    B, k = limits.groups_per_step, limits.max_age
    uses = rng.randint(1, k + 1)
    return replace(limits, max_uses=uses, publish_every=rng.randint(1, k + 2 - uses), fresh_per_step=rng.randint(1, B))


async def random_run(
    seed: int, *, over_age: str, acts: int, model: type[Model] = Model, limits_of: LimitsOf = random_limits
) -> Driver:
    """One schedule on the reference model alone; `model` may be one with a guard removed. Raises Broken."""
    rng = random.Random(seed)
    clock = Clock()
    limits = limits_of(rng, over_age)
    buffer = MemoryBuffer("r", limits, clock=clock)
    buffer._model = model(limits)
    driver = Driver([buffer], clock, rng, limits)
    await driver.run(acts)
    return driver
