"""A run without a model: the real store, the real collector process, the real buffer, and a learner that only waits.

The learner leases, lets the nominal step time pass, commits and announces weights that are only a name; the collector's
engine lets the time of log-normal lengths pass. What remains is what asyncrl itself does with time, to be compared
with `pipeline_model` on the very same lengths, slots and steps.
"""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from asyncrl.benchmarks.pipeline_model import Pipeline
from asyncrl.buffers.base import Buffer, Lease, Limits, State
from asyncrl.buffers.store import Store
from asyncrl.config import recipe as recipes
from asyncrl.config.identity import recipe_hash
from asyncrl.schema import decode, max_group_bytes, version_range
from asyncrl.staleness import Weights, age

MEAN_TOKENS = 20.0
"""A length in tokens is only a size here; few keep the work of encoding small beside what is measured."""

LONGEST = 100
"""Times the mean: what a group's reserved bytes allow. Log-normal with cv 1 exceeds it once in 10^8 draws."""

STEPS_BEYOND = 12
"""Steps the run could go on after the measured ones. The last steps of a run have no tickets behind them to hide their
stragglers; the model has no end."""

JOIN_LIMIT_S = 120.0  # the collector process imports, connects and joins
STEP_LIMIT_S = 60.0  # one step, two hundred times what it should take
END_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Observed:
    """The same numbers as `pipeline_model.Outcome`, from a real run. Ages are of the oldest token of each group."""

    efficiency: float
    mean_age: float
    max_age: int
    lost: float
    wall_s: float


async def observe(store: Store, setting: Pipeline, *, name: str, step_s: float, log: Path) -> Observed:
    """Run one setting as run `name` in `store`; `step_s` seconds are one step. The collector's messages go to `log`.

    Raises TimeoutError, naming what did not come, and RuntimeError if the collector ended early.
    """
    recipe = recipe_of(setting, name=name, step_s=step_s)
    limits = Limits(
        max_age=setting.k,
        groups_per_step=setting.B,
        max_steps=recipe.run.max_steps,
        over_age=setting.policy,
        lookahead=setting.lookahead,
        group_bytes=max_group_bytes(setting.G, round(LONGEST * MEAN_TOKENS)),
    )
    buffer = await store.create_run(
        name, recipe=recipes.to_builtins(recipe), recipe_hash=recipe_hash(recipe), limits=limits
    )
    try:
        async with _collector(store.url, name, log) as process:
            return await _train(buffer, setting, step_s=step_s, process=process)
    finally:
        await buffer.close()


def recipe_of(setting: Pipeline, *, name: str, step_s: float) -> recipes.Recipe:
    """The recipe of a setting. The engine's time per token makes a group last c steps on average."""
    return recipes.Recipe(
        run=recipes.Run(name=name, max_steps=setting.steps + STEPS_BEYOND, seed=setting.seed),
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


@asynccontextmanager
async def _collector(url: str, name: str, log: Path) -> AsyncIterator[Process]:
    """A collector process by the command a person would type; ended with the context at the latest."""
    command = [sys.executable, "-m", "asyncrl.cli.main", "collector", "--buffer", url, "--run", name]
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


async def _train(buffer: Buffer, setting: Pipeline, *, step_s: float, process: Process) -> Observed:
    """The learner. Time runs from the first ticket to the last commit, by the clock both processes share."""
    lineage = await buffer.new_lineage(parent=None, limits=buffer.limits)
    await _announce(buffer, Weights(lineage, 0))
    began = 0.0
    ages: list[int] = []
    ended = 0.0
    for step in range(setting.steps):
        lease = await _lease(buffer, lineage, step, process=process)
        due = asyncio.get_running_loop().time() + step_s  # fetching and checking lie within the step, as in training
        for payload in await buffer.payloads(lease):
            group = decode(payload)
            ages.append(age(step, version_range(group)[0]))
            if step == 0:
                issued = float(group["issued"][0].as_py())
                began = min(began or issued, issued)
        await asyncio.sleep(due - asyncio.get_running_loop().time())
        await buffer.commit(lineage, step)
        ended = time.time()
        await _announce(buffer, Weights(lineage, step + 1))
    states = (await buffer.stats()).states
    await buffer.finish()
    lost = states[State.STALE] + states[State.FAILED]
    return Observed(
        efficiency=setting.steps * step_s / (ended - began),
        mean_age=sum(ages) / len(ages),
        max_age=max(ages),
        lost=lost / (lost + states[State.TRAINED]),
        wall_s=ended - began,
    )


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
