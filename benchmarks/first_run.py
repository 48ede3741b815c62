"""`first-run`: what a newcomer gets from `asyncrl run`, on five seeds. Does it learn, from where to where, how fast?

Control: the same run with a learning rate of 1e-12, that is, with everything but the learning. If it reached the
target, the target would measure something else.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path

from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.benchmarks.runs import train

SEEDS = range(5)
REWARD_END = 0.85
REWARD_START = 0.40
WALL_S = 90.0
NO_LEARNING = 1e-12


def measure(*, quick: bool, say: Say) -> Measured:
    """Rows: one per seed (quick: seed 0), and the control."""
    from asyncrl.learners.tiny import ensure_tiny  # loads torch

    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as parent:

        def row(seed: int, kind: str, **settings: object) -> Row:
            name = f"bench-{kind}-seed{seed}"
            found = train(Path(parent) / name, {"run.name": name, "run.seed": seed, **settings})
            say(f"{kind} seed {seed}: reward {found.reward_start:.2f} -> {found.reward_end:.2f}, {found.wall_s:.0f} s")
            return {"kind": kind, "seed": seed, **asdict(found)}

        rows = []
        for seed in SEEDS[:1] if quick else SEEDS:
            ensure_tiny(seed)  # made once per machine and cached: not part of what a run takes
            rows.append(row(seed, "run"))
        control = row(0, "control", **{"learner.learning_rate": NO_LEARNING})
    return Measured(rows=[*rows, control], targets=targets(rows, control))


def targets(rows: list[Row], control: Row) -> list[Target]:
    """What the rows of all seeds should be: judged by the worst one, never by a mean."""
    return [
        Target(
            f"mean reward of the last 20 steps, worst seed of {len(rows)}",
            min(row["reward_end"] for row in rows),
            REWARD_END,
            "higher",
        ),
        Target(
            "mean reward of what the initial weights sampled, highest seed",
            max(row["reward_start"] for row in rows),
            REWARD_START,
            "lower",
        ),
        Target("wall seconds of a run, slowest", max(row["wall_s"] for row in rows), WALL_S, "lower"),
        Target("age of the oldest trained token", max(row["age_max"] for row in rows), 1, "lower"),
        Target("control: last 20 steps without learning", control["reward_end"], REWARD_END, "lower"),
    ]
