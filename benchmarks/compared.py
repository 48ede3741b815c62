"""Settings of the pipeline, each run for real and calculated by the model, side by side in a row."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from statistics import stdev

from asyncrl.benchmarks.frame import Row, Say
from asyncrl.benchmarks.pipeline_model import Outcome, Pipeline, simulate
from asyncrl.benchmarks.simulated import Observed, observe

STEP_S = 1.5
"""Seconds of a step. What asyncrl does between two steps takes tens of milliseconds, whatever a step takes: this is a
short step still, and with a shorter one the benchmark would measure how busy its two cores are."""

TOGETHER = 4
"""Settings that run at once: each of them waits nearly all the time, and keeps a fifth of a core busy."""

NOISE_SEEDS = range(100, 116)
"""Of the model, with other lengths each: how far two runs of one setting may differ."""


def compare(settings: Sequence[Pipeline], *, folder: Path, say: Say, step_s: float = STEP_S) -> list[Row]:
    """One row per setting, in their order: what a real run gave (`observe`), what the model says (`model_...`), and the
    share of the model's efficiency that the run reached (`of_model`). Each gets a folder of its own in `folder`."""
    models = [simulate(setting) for setting in settings]
    by_length = sorted(range(len(settings)), key=lambda n: models[n].efficiency / settings[n].steps)
    found: dict[int, Row] = {}
    spawn = multiprocessing.get_context("spawn")  # a forked process would share the parent's loops and threads
    with ProcessPoolExecutor(TOGETHER, mp_context=spawn) as pool:
        runs = {pool.submit(_observe, settings[n], step_s, folder / str(n)): n for n in by_length}
        for run in as_completed(runs):
            n = runs[run]
            found[n] = _row(settings[n], run.result(), models[n], step_s)
            say(
                f"{settings[n].policy}, c {settings[n].c:g}, age {settings[n].k}: efficiency "
                f"{found[n]['efficiency']:.3f}, model {models[n].efficiency:.3f}; lost {found[n]['lost']:.1%}"
            )
    return [found[n] for n in range(len(settings))]


def noise(setting: Pipeline) -> dict[str, float]:
    """Standard deviation of a setting's numbers over NOISE_SEEDS of the model, by the names of `Outcome`. One group
    more or less is no difference, so that none is below its share."""
    outcomes = [asdict(simulate(replace(setting, seed=seed))) for seed in NOISE_SEEDS]
    least = 1 / (setting.steps * setting.B)
    spread = {}
    for name in ("lost", "length_ratio", "lost_length_ratio"):
        values = [outcome[name] for outcome in outcomes if outcome[name] is not None]
        spread[name] = max(least, stdev(values)) if len(values) > 1 else least
    return spread


def _observe(setting: Pipeline, step_s: float, folder: Path) -> Observed:
    folder.mkdir(parents=True)
    return asyncio.run(observe(setting, step_s=step_s, folder=folder))


def _row(setting: Pipeline, observed: Observed, model: Outcome, step_s: float) -> Row:
    return {
        **asdict(setting),
        "step_s": step_s,
        **asdict(observed.outcome),
        "wall_s": observed.wall_s,
        **{f"model_{name}": value for name, value in asdict(model).items()},
        "of_model": observed.outcome.efficiency / model.efficiency,
    }
