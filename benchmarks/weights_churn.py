"""Part of `weights`: collectors that join, leave, freeze and die, while the learner publishes again and again.

A store, a learner's outlet and collectors' processes as in a run, only without a model: an engine keeps the bytes that
it is given and reports what they hash to. All of it shares the machine's cores, so what is measured is not how fast
weights travel but what must hold whatever happens to their readers: the learner is never held up for longer than the
deadline, who lives ends with the last version, and nobody ever serves anything that was not published.

Control: a bit flips on the way, as it does in the other rows now and then, and nobody checks: it must be found.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Literal

import torch

from asyncrl.benchmarks import weights_churn_member
from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.buffers.base import Buffer, Lease
from asyncrl.buffers.limits import Limits
from asyncrl.buffers.server import EmbeddedServer
from asyncrl.buffers.store import Store, open_store
from asyncrl.config import recipe as recipes
from asyncrl.config.identity import recipe_hash
from asyncrl.config.weights import WeightsConfig
from asyncrl.learners.outlet import Outlet
from asyncrl.schema import max_group_bytes
from asyncrl.staleness import Weights
from asyncrl.weights.base import Transport
from asyncrl.weights.reach import here

TENSORS, ELEMENTS = 8, 32_768  # float32: 1 MiB in all
DEADLINE_S = 6.0
SILENT_S = 4.0  # after which the run gives a collector up
PAUSE_S = 0.25  # between two publications, as a step would be
QUIET = 10  # the last publications, in which nothing happens to anybody any more
START_S, END_S = 120.0, 60.0
SAMPLER = "sampler"  # takes the tickets and is left alone, so that the learner always has a batch


@dataclass(frozen=True, slots=True)
class Setting:
    """One row."""

    transport: Transport
    members: int
    publications: int
    damaged: int = 20  # every so many transfers of a collector a bit flips
    checked: bool = True

    @property
    def name(self) -> str:
        return f"{self.transport}, {self.members} collectors, {self.publications} versions"


FULL = (Setting("collective", 16, 100), Setting("file", 6, 30))
QUICK = (Setting("collective", 6, 30), Setting("file", 4, 20))
CONTROL = Setting("file", 2, 12, damaged=4, checked=False)

What = Literal["join", "leave", "kill", "stop", "continue"]
WHAT: tuple[What, ...] = ("kill", "stop", "leave")
SIGNALS: Mapping[What, signal.Signals] = {
    "leave": signal.SIGTERM,
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "continue": signal.SIGCONT,
}
EVERY, STOPPED = 6, 40
"""Publications from one act to the next; from a stop to its end, which the run does not wait for."""


@dataclass(frozen=True, slots=True)
class Act:
    """What happens to a collector after a publication."""

    after: int
    what: What
    member: str


def plan(members: int, publications: int, *, seed: int = 0) -> list[Act]:
    """Three quarters are there at the start, the others join late. One at a time, in turns, is killed, stopped or told
    to leave, and another joins in its place; who was stopped goes on after a while.

    >>> [f"{act.after} {act.what} {act.member}" for act in plan(4, 30)][3:]
    ['2 kill m1', '2 join m4', '7 join m3', '8 stop m4', '13 join m5', '20 continue m4']
    """
    draw, names = random.Random(seed), (f"m{n}" for n in count())
    present = [next(names) for _ in range(members - members // 4)]
    acts = [Act(0, "join", name) for name in present]
    for number, after in enumerate(range(2, publications - QUIET - EVERY, EVERY)):
        victim, what = present.pop(draw.randrange(len(present))), WHAT[number % len(WHAT)]
        acts.append(Act(after, what, victim))
        if what == "stop":
            acts.append(Act(min(after + STOPPED, publications - QUIET), "continue", victim))
        joining = [Act(after + EVERY - 1, "join", next(names))]
        if number < members // 4:
            joining.append(Act(after, "join", next(names)))
        acts += joining
        present += [act.member for act in joining]
    return sorted(acts, key=lambda act: act.after)


class Crowd:
    """The collectors' processes. They are forked from a server that has imported all they need, and runs nothing."""

    def __init__(self, url: str, recipe: recipes.Recipe, folder: Path, setting: Setting) -> None:
        self._url, self._recipe, self._folder, self._setting = url, recipe, folder, setting
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload([weights_churn_member.__name__])
        self._processes: dict[str, ForkServerProcess] = {}
        self.living: set[str] = set()  # by what was done to them: those that must end with the last version

    def act(self, what: What, member: str) -> None:
        if what == "join":
            role = weights_churn_member.Role(
                url=self._url,
                recipe=self._recipe,
                name=member,
                folder=self._folder,
                samples=member == SAMPLER,
                damaged=self._setting.damaged,
                checked=self._setting.checked,
            )
            self._processes[member] = self._context.Process(
                target=weights_churn_member.serve, args=(role,), name=member, daemon=True
            )
            self._processes[member].start()
            self.living.add(member)
            return
        pid = self._processes[member].pid
        if pid is None:
            raise ValueError(f"collector {member} was never started")
        os.kill(pid, SIGNALS[what])
        if what == "continue":
            self.living.add(member)
        else:
            self.living.discard(member)

    def dead(self) -> list[str]:
        """Who has ended, and nobody made it."""
        return [name for name in self.living if not self._processes[name].is_alive()]

    def end(self, limit_s: float) -> None:
        """They end with their run; what has not within the limit is killed."""
        until = time.monotonic() + limit_s
        for process in self._processes.values():
            process.join(max(0.0, until - time.monotonic()))
            process.kill()
            process.join()


@dataclass(slots=True)
class Seen:
    """What the learner has measured and published."""

    published: dict[Weights, str] = field(default_factory=dict)  # -> checksum
    publish_s: list[float] = field(default_factory=list)
    late: int = 0  # collectors that were named
    settled_s: float = 0.0  # from the last publication until all that live serve it
    behind: int = 0  # that live and do not, by then


def measure(*, quick: bool, say: Say) -> Measured:
    """A row per setting, and the control."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _quiet():  # who is late is counted
            rows = [asyncio.run(churned(setting, say)) for setting in (*(QUICK if quick else FULL), CONTROL)]
    finally:
        torch.set_num_threads(threads)
    return Measured(rows, targets(rows))


def targets(rows: list[Row]) -> list[Target]:
    """What must hold in each row; what must be found in the control."""
    found = []
    for row in rows:
        if row["kind"] == "control":
            found.append(Target("control: unchecked, versions that were never published", row["wrong"], 1, "higher"))
            continue
        way = row["way"]
        found += [
            Target(f"{way}: longest publication, of the deadline", row["publish_max_s"] / DEADLINE_S, 1.0, "lower"),
            Target(f"{way}: living collectors that do not end with the last version", row["behind"], 0, "lower"),
            Target(f"{way}: served, but never published", row["wrong"], 0, "lower"),
        ]
    return found


async def churned(setting: Setting, say: Say) -> Row:
    """One setting, in a store of its own."""
    limits = Limits(
        max_age=setting.publications,
        groups_per_step=1,
        max_steps=setting.publications + 1,
        group_bytes=max_group_bytes(1, 100),
        member_timeout_s=SILENT_S,
    )
    acts = plan(setting.members, setting.publications)
    with TemporaryDirectory(prefix="asyncrl-bench-") as parent:
        folder = Path(parent)
        recipe = _recipe(setting, folder / "weights")
        async with EmbeddedServer(folder / "store") as server, _opened(server.url) as store:
            buffer = await store.create_run(
                recipe.run.name,
                recipe=recipes.to_builtins(recipe),
                recipe_hash=recipe_hash(recipe),
                limits=limits,
            )
            crowd = Crowd(server.url, recipe, folder, setting)
            try:
                await asyncio.to_thread(crowd.act, "join", SAMPLER)
                seen = await _publish_all(recipe, buffer, crowd, acts, setting.publications)
            finally:
                await asyncio.to_thread(crowd.end, END_S)
        row = _row(setting, acts, seen, _reports(folder))
    say(
        f"churn over {row['way']}: publish {1e3 * row['publish_p50_s']:.0f} ms, at most {row['publish_max_s']:.2f} s; "
        f"{row['kills']} killed, {row['stops']} stopped, {row['leaves']} left, {row['joins']} joined; {row['served']} "
        f"versions served, {row['wrong']} of them wrong; {row['behind']} behind after {row['settled_s']:.1f} s"
    )
    return row


async def _publish_all(
    recipe: recipes.Recipe, buffer: Buffer, crowd: Crowd, acts: list[Act], publications: int
) -> Seen:
    """Train nothing, publish, and have done to the collectors what is planned."""
    seen = Seen()
    lineage = await buffer.new_lineage(parent=None, limits=buffer.limits)
    outlet = Outlet(recipe, buffer, stop=asyncio.Event())
    outlet.start(here())
    try:
        for version in range(publications + 1):
            if version:
                await _trained(buffer, Weights(lineage, version - 1))
            began = time.perf_counter()
            source = _tensors(version)
            image = await outlet.publish(Weights(lineage, version), source, tied={}, fork=Weights(0, 0))
            seen.publish_s.append(time.perf_counter() - began)
            seen.published[image.weights] = image.manifest.checksum
            for act in acts:
                if act.after == version:
                    await asyncio.to_thread(crowd.act, act.what, act.member)
            if not version:
                await _until(buffer, crowd, image.weights, START_S)
            seen.late += len(outlet.take_late())
            await asyncio.sleep(PAUSE_S)
        began = time.perf_counter()
        seen.behind = len(await _until(buffer, crowd, image.weights, 2 * DEADLINE_S))
        seen.settled_s = time.perf_counter() - began
        seen.late += len(outlet.take_late())
        await buffer.finish()
    finally:
        await outlet.close()
    return seen


async def _trained(buffer: Buffer, weights: Weights) -> None:
    """A step from `weights`, that changes nothing. Raises TimeoutError without a batch, which the sampler brings."""
    async with asyncio.timeout(START_S):
        while not isinstance(await buffer.lease(*weights, wait_s=1.0), Lease):
            pass
    await buffer.commit(*weights)


async def _until(buffer: Buffer, crowd: Crowd, weights: Weights, limit_s: float) -> set[str]:
    """Who of the living does not serve `weights`: nobody, or those who do not within the limit."""
    until = time.monotonic() + limit_s
    while True:
        if dead := crowd.dead():
            raise RuntimeError(f"collectors ended by themselves: {', '.join(dead)}")
        members = (await buffer.stats()).members
        behind = crowd.living - {member.name for member in members if member.serving == weights}
        if not behind or time.monotonic() >= until:
            return behind
        await asyncio.sleep(0.05)


def _tensors(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Other values everywhere than in any other version."""
    for n in range(TENSORS):
        yield f"t{n}", torch.full((ELEMENTS,), float(version * TENSORS + n))


def _reports(folder: Path) -> list[list[tuple[Weights, str]]]:
    """What each collector has served; a process that was killed may have left half a line."""
    reports = []
    for path in folder.glob("*.served"):
        lines = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        reports.append([(Weights(int(lineage), int(version)), checksum) for lineage, version, checksum in lines])
    return reports


def _row(setting: Setting, acts: list[Act], seen: Seen, reports: list[list[tuple[Weights, str]]]) -> Row:
    done = [one for report in reports for one in report]
    return {
        "kind": "churn" if setting.checked else "control",
        "way": setting.name,
        "publish_p50_s": median(seen.publish_s),
        "publish_p99_s": quantiles(seen.publish_s, n=100, method="inclusive")[-1],
        "publish_max_s": max(seen.publish_s),
        "deadline_s": DEADLINE_S,
        **{f"{what}s": sum(act.what == what for act in acts) for what in ("join", "kill", "stop")},
        "leaves": sum(act.what == "leave" for act in acts),
        "late": seen.late,
        "served": len(done),
        "served_by_one_p50": median(len(report) for report in reports),
        "wrong": sum(seen.published.get(weights) != checksum for weights, checksum in done),
        "behind": seen.behind,
        "settled_s": seen.settled_s,
    }


def _recipe(setting: Setting, url: Path) -> recipes.Recipe:
    """The learner is never without a batch, however old: what it does otherwise is not what is measured."""
    return recipes.Recipe(
        run=recipes.Run(name="churn", max_steps=setting.publications + 1),
        buffer=recipes.Buffer(max_trajectory_age=setting.publications),
        collector=recipes.Collector(engine=recipes.SimulatedEngine(), group_size=1),
        learner=recipes.Learner(groups_per_step=1),
        weights=WeightsConfig(
            transport=setting.transport,
            url=str(url) if setting.transport == "file" else None,
            deadline_s=DEADLINE_S,
        ),
    )


@asynccontextmanager
async def _opened(url: str) -> AsyncIterator[Store]:
    store = await open_store(url)
    try:
        yield store
    finally:
        await store.close()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the product says of collectors that come to harm."""
    product = logging.getLogger("asyncrl")
    before = product.level
    product.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        product.setLevel(before)
