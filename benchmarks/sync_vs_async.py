"""`sync-vs-async`: what asynchrony gains, and whether asyncrl gains as much of it as there is.

(a) The tiny model at several ages: time per step, what the learner waits, the reward it ends with, and the ages of
what was trained, from the archive. (b) The simulated engine, log-normal lengths: how busy the learner is, over how busy
it is in the pipeline model on the very same lengths. Age 0 is synchronous training.

Controls: with the bound taken away the measured age must exceed it; and synchronous training must fall short of what
the model says of age 4.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from asyncrl.benchmarks.compared import compare
from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.benchmarks.pipeline_model import Pipeline, simulate
from asyncrl.benchmarks.runs import train
from asyncrl.buffers.limits import OverAge

OF_MODEL = 0.9
"""Share of the model's efficiency that the real pipeline must reach: the model has no costs at all."""

REWARD_END = 0.85
UNBOUND = 8  # the age allowed in the control
POLICIES: tuple[OverAge, ...] = ("wait", "drop")


def measure(*, quick: bool, say: Say) -> Measured:
    """Rows of both parts, told apart by `part`. quick: ages 0 and 1 of (a); a smaller pipeline at fewer ages of (b)."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        # (b) first: the model's processes of (a) may still give their memory back while the next part starts.
        simulated, control = simulated_rows(Path(folder), quick=quick, say=say)
        tiny = tiny_rows(Path(folder), ages=(0, 1) if quick else (0, 1, 2, 4), say=say)
    return Measured(
        rows=[*tiny, *simulated, control], targets=[*tiny_targets(tiny), *simulated_targets(simulated, control)]
    )


# --- (a) the tiny model -----------------------------------------------------------------------------------------------


def tiny_rows(folder: Path, *, ages: tuple[int, ...], say: Say) -> list[Row]:
    """The default run at each age, seed 0."""
    from asyncrl.learners.tiny import ensure_tiny  # loads torch

    ensure_tiny(0)
    rows = []
    for k in ages:
        name = f"bench-age{k}"
        found = train(folder / name, {"run.name": name, "buffer.max_trajectory_age": k})
        rows.append(
            {
                "part": "tiny",
                "k": k,
                "step_s": found.step_s,
                "tokens_per_s": found.tokens / found.steps / found.step_s,
                "wait_share": found.wait_share,
                "reward_end": found.reward_end,
                "age_mean": found.age_mean,
                "age_max": found.age_max,
                "wall_s": found.wall_s,
            }
        )
        say(f"tiny model, age {k}: {found.step_s:.3f} s a step, waits {found.wait_share:.0%} of it")
    return rows


def tiny_targets(rows: list[Row]) -> list[Target]:
    """Bounds kept, skill reached at every age; and asynchrony is not slower than its absence."""
    by_age = {row["k"]: row for row in rows}
    return [
        *(Target(f"tiny, age {k}: oldest trained token", row["age_max"], k, "lower") for k, row in by_age.items()),
        *(
            Target(f"tiny, age {k}: reward of the last 20 steps", row["reward_end"], REWARD_END, "higher")
            for k, row in by_age.items()
        ),
        Target("tiny: step time at age 1 over age 0, medians", by_age[1]["step_s"] / by_age[0]["step_s"], 1.0, "lower"),
    ]


# --- (b) the simulated engine -----------------------------------------------------------------------------------------


def simulated_rows(folder: Path, *, quick: bool, say: Say) -> tuple[list[Row], Row]:
    """One row per policy and age, and the control."""
    base = Pipeline(k=0, B=8, steps=12) if quick else Pipeline(k=0, steps=30)
    ages = (0, 1, 4) if quick else (0, 1, 2, 4, 8)
    settings = [replace(base, policy=policy, k=k) for policy in POLICIES for k in ages]
    control = replace(base, policy="wait", k=UNBOUND)
    rows = compare([*settings, control], folder=folder / "simulated", say=say)
    for row, setting in zip(rows, [*settings, control], strict=True):
        row["part"] = "control" if setting is control else "simulated"
        row["model_efficiency_group_slots"] = simulate(replace(setting, holder="group")).efficiency
    return rows[:-1], rows[-1]


def simulated_targets(rows: list[Row], control: Row) -> list[Target]:
    """Every row against the model and its bound; the control against the bound that was taken away."""
    synchronous = next(row for row in rows if row["k"] == 0)
    far = next(row for row in rows if row["k"] == 4)
    return [
        *(
            Target(f"simulated, {row['policy']}, age {row['k']}: of the model", row["of_model"], OF_MODEL, "higher")
            for row in rows
        ),
        Target(
            "simulated: oldest trained token beyond its bound, worst row",
            max(row["max_age"] - row["k"] for row in rows),
            0,
            "lower",
        ),
        Target("simulated, wait: share of groups lost", max(_lost(rows, "wait")), 0.0, "lower"),
        Target("control: oldest trained token with the bound of age 1 taken away", control["max_age"], 2, "higher"),
        Target(
            "control: synchronous efficiency over the model's at age 4",
            synchronous["efficiency"] / far["model_efficiency"],
            OF_MODEL,
            "lower",
        ),
    ]


def _lost(rows: list[Row], policy: OverAge) -> list[float]:
    return [row["lost"] for row in rows if row["policy"] == policy]
