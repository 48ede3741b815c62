"""A run without a model: the real store, the real collector process, the real buffer, and a learner that only waits.

The learner leases, lets the nominal step time pass, archives, commits and announces weights that are only a name; the
collector's engine lets the time of log-normal lengths pass. What remains is what asyncrl itself does with time, to be
compared with `pipeline_model` on the very same lengths, slots and steps.

What was lost, trained and masked is recomputed from the archive's parts and the ledger's rows; lengths are a function
of seed, ticket and member.
"""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from asyncrl.benchmarks.pipeline_model import Outcome, Pipeline, group_length
from asyncrl.buffers.archive import Archive
from asyncrl.buffers.base import Buffer, Lease, State, TicketRow
from asyncrl.buffers.limits import Limits
from asyncrl.buffers.server import EmbeddedServer
from asyncrl.buffers.store import Store, open_store
from asyncrl.config import recipe as recipes
from asyncrl.config.identity import recipe_hash
from asyncrl.runtime import tether
from asyncrl.schema import decode, max_group_bytes
from asyncrl.staleness import Weights, age

RUN = "simulated"

MEAN_TOKENS = 20.0
"""A length in tokens is only a size here; few keep the work of encoding small beside what is measured."""

LONGEST = 100
"""Times the mean: what a group's reserved bytes allow. Log-normal with cv 1 exceeds it once in 10^8 draws."""

STEPS_BEYOND = 12
"""Steps the run could go on after the measured ones. The last steps of a run have no tickets behind them to hide their
stragglers; the model has no end."""

JOIN_LIMIT_S = 120.0  # the collector process imports, connects and joins
STEP_LIMIT_S = 120.0  # one step, many times what the slowest should take
END_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Observed:
    """The same numbers as `pipeline_model.Outcome`, of a real run, and the seconds it took."""

    outcome: Outcome
    wall_s: float


async def observe(setting: Pipeline, *, step_s: float, folder: Path) -> Observed:
    """Run one setting on a store of its own in the new `folder`; `step_s` seconds are one step.

    Raises TimeoutError, naming what did not come, and RuntimeError if the collector ended early.
    """
    recipe = recipe_of(setting, step_s=step_s)
    limits = Limits(
        max_age=setting.k,
        groups_per_step=setting.B,
        max_steps=recipe.run.max_steps,
        over_age=setting.policy,
        lookahead=setting.lookahead,
        group_bytes=max_group_bytes(setting.G, round(LONGEST * MEAN_TOKENS)),
    )
    async with EmbeddedServer(folder) as server, _connected(server.url) as store:
        buffer = await store.create_run(
            RUN, recipe=recipes.to_builtins(recipe), recipe_hash=recipe_hash(recipe), limits=limits
        )
        archive = Archive(folder / "archive")
        async with _collector(store.url, folder / "collector.log") as process:
            rows, wall_s = await _train(buffer, archive, setting, step_s=step_s, process=process)
    return Observed(judge(archive, rows, setting, efficiency=setting.steps * step_s / wall_s), wall_s)


def recipe_of(setting: Pipeline, *, step_s: float) -> recipes.Recipe:
    """The recipe of a setting. The engine's time per token makes a group last c steps on average."""
    return recipes.Recipe(
        run=recipes.Run(name=RUN, max_steps=setting.steps + STEPS_BEYOND, seed=setting.seed),
        buffer=recipes.Buffer(max_trajectory_age=setting.k, over_age=setting.policy, lookahead=setting.lookahead),
        collector=recipes.Collector(
            engine=recipes.SimulatedEngine(
                slots=setting.slots,
                token_s=setting.scale * step_s / MEAN_TOKENS,
                mean_tokens=MEAN_TOKENS,
                cv=setting.cv,
            ),
            group_size=setting.G,
        ),
        learner=recipes.Learner(groups_per_step=setting.B),
    )


def judge(archive: Archive, rows: Sequence[TicketRow], setting: Pipeline, *, efficiency: float) -> Outcome:
    """What was trained, by the archive's parts, and what else became of the tickets, by the ledger's rows. (Of a
    trained ticket the ledger is not asked: its last step may not be committed yet.)"""
    ages: list[int] = []
    trained: list[int] = []
    tokens = masked = 0
    for step in archive.parts():
        for group in archive.groups(step):
            sampled = group["versions"].flatten().to_numpy()[group["loss_mask"].flatten().to_numpy() == 1]
            of_tokens = [age(step.version, version) for version in sampled.tolist()]
            kept = [n for n in of_tokens if n <= setting.k] if setting.policy == "mask" else of_tokens
            trained.append(group["ticket"][0].as_py())
            ages.append(max(kept))
            tokens += len(of_tokens)
            masked += len(of_tokens) - len(kept)
    lost = [row.ordinal for row in rows if row.state in (State.STALE, State.FAILED)]
    length = {row.ordinal: group_length(setting, row.ordinal) for row in rows}
    mean_trained = fmean(length[ticket] for ticket in trained)
    return Outcome(
        efficiency=efficiency,
        mean_age=fmean(ages),
        max_age=max(ages),
        lost=len(lost) / (len(lost) + len(trained)),
        length_ratio=mean_trained / fmean(length.values()),
        lost_length_ratio=fmean(length[ticket] for ticket in lost) / mean_trained if lost else None,
        masked=masked / tokens,
        attempts=fmean(row.attempt + 1 for row in rows),
    )


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Store]:
    store = await open_store(url)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def _collector(url: str, log: Path) -> AsyncIterator[Process]:
    """A collector process by the command a person would type; ended with the context at the latest."""
    command = tether.command([sys.executable, "-m", "asyncrl.cli.main", "collector", "--buffer", url, "--run", RUN])
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
    try:
        yield process
        try:
            code = await asyncio.wait_for(process.wait(), END_LIMIT_S)
        except TimeoutError:
            raise TimeoutError(f"the collector did not end {END_LIMIT_S:.0f} s after its run") from None
        if code != 0:
            said = await asyncio.to_thread(log.read_text, errors="replace")
            raise RuntimeError(f"the collector ended with code {code}: {said[-2000:]}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _train(
    buffer: Buffer, archive: Archive, setting: Pipeline, *, step_s: float, process: Process
) -> tuple[list[TicketRow], float]:
    """The learner. Returns the ledger while the last step is made, before which nothing more can be lost, and the
    seconds from the first ticket to the last commit, by the clock both processes share."""
    loop = asyncio.get_running_loop()
    lineage = await buffer.new_lineage(parent=None, limits=buffer.limits)
    await _announce(buffer, Weights(lineage, 0))
    began = ended = 0.0
    rows: list[TicketRow] = []
    for step in range(setting.steps):
        lease = await _lease(buffer, lineage, step, process=process)
        due = loop.time() + step_s  # fetching, checking and archiving lie within the step, as in training
        groups = [decode(payload) for payload in await buffer.payloads(lease)]
        if step == 0:
            began = min(float(group["issued"][0].as_py()) for group in groups)
        await asyncio.to_thread(archive.write, lineage, step, groups)
        if step == setting.steps - 1:
            _, rows = await buffer.snapshot()
        await asyncio.sleep(due - loop.time())
        await buffer.commit(lineage, step)
        ended = time.time()
        await _announce(buffer, Weights(lineage, step + 1))
    await buffer.finish()
    return rows, ended - began


async def _announce(buffer: Buffer, weights: Weights) -> None:
    document = {
        "transport": "none",
        "checksum": f"{weights.version:016x}",
        "lineage": weights.lineage,
        "version": weights.version,
        "fork": {"parent": 0, "version": 0},
    }
    await buffer.announce(weights, document)


async def _lease(buffer: Buffer, lineage: int, step: int, *, process: Process) -> Lease:
    limit_s = STEP_LIMIT_S if step else STEP_LIMIT_S + JOIN_LIMIT_S
    deadline = time.monotonic() + limit_s
    while True:
        found = await buffer.lease(lineage, step, wait_s=2.0)
        if isinstance(found, Lease):
            return found
        if process.returncode is not None:
            raise RuntimeError(f"the collector ended with code {process.returncode} before step {step}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"no batch for step {step} within {limit_s:.0f} s: {found.reason}")
