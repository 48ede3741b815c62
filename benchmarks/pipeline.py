"""`pipeline`: what the age bound costs, policy by policy, and whether asyncrl pays more than there is to pay.

Real store, collector process and buffer; an engine that lets the time of log-normal lengths pass, a learner that waits
a step's time (`simulated`); beside each row the model on the very same lengths, slots and steps (`pipeline_model`).
What was lost and masked is recomputed from archive and ledger.

Controls: with the bound taken away, `drop` must train what is over age and must not lose what the model loses; and the
efficiency of a small age must not pass for that of a larger one.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from asyncrl.benchmarks.compared import compare, noise
from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.benchmarks.pipeline_model import Pipeline

OF_MODEL = 0.95
"""Share of the model's efficiency that a row must reach. The model has no costs at all, and moves no bytes."""

SIGMAS = 3.0
"""How far a run's losses may be from the model's, in standard deviations of the model over other lengths: of 18 numbers
that differ by chance alone, one in twenty sets has one beyond."""

STEPS, QUICK_STEPS = 30, 12
UNBOUND = 8  # the age allowed in the control
JUDGED = Pipeline(k=1, policy="drop", steps=STEPS)  # what the control is judged as


def measure(*, quick: bool, say: Say, full: bool = False) -> Measured:
    """cv 1, c 1 and 2, ages 0, 1 and 4 under `wait` and `drop`; `mask` and `requeue` at age 1; the control.

    full: as well cv 0.5, c 0.5, ages 2 and 8. quick: c 1, ages 1 and 4, a small pipeline."""
    chosen = settings(quick=quick, full=full)
    judged = replace(chosen[0], k=JUDGED.k, c=JUDGED.c, policy=JUDGED.policy)
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        *rows, control = compare([*chosen, replace(judged, k=UNBOUND)], folder=Path(folder), say=say)
    for row, setting in zip(rows, chosen, strict=True):
        row.update({"kind": "pipeline", **_apart(row, setting)})
    model = next((row for row in rows if _is(row, judged)), None)
    assert model is not None, "the control is judged by one of the rows"
    control.update({"kind": "control", **{name: model[name] for name in model if name.startswith("model_")}})
    control.update({"k": judged.k, **_apart(control, judged)})
    return Measured(rows=[*rows, control], targets=targets(rows, control))


def settings(*, quick: bool, full: bool) -> list[Pipeline]:
    """What is measured, without the control."""
    if quick:
        small = Pipeline(k=1, B=8, steps=QUICK_STEPS)
        return [replace(small, policy=policy, k=k) for policy in ("wait", "drop") for k in (1, 4)]
    cvs, cs, ages = ((0.5, 1.0), (0.5, 1.0, 2.0), (0, 1, 2, 4, 8)) if full else ((1.0,), (1.0, 2.0), (0, 1, 4))
    bounds = [
        Pipeline(k=k, c=c, cv=cv, policy=policy, steps=STEPS)
        for policy in ("wait", "drop")
        for cv in cvs
        for c in cs
        for k in ages
    ]
    return [*bounds, *(replace(JUDGED, policy=policy, c=c) for policy in ("mask", "requeue") for c in (1.0, 2.0))]


def targets(rows: list[Row], control: Row) -> list[Target]:
    """Every row against its bound; `wait` and `drop` against the model; the control against both."""
    found = [Target("oldest trained token beyond its bound, worst row", max(_beyond(row) for row in rows), 0, "lower")]
    for row in rows:
        name = f"{row['policy']}, cv {row['cv']:g}, c {row['c']:g}, age {row['k']}"
        if row["policy"] in ("wait", "drop"):
            found.append(Target(f"{name}: efficiency of the model's", row["of_model"], OF_MODEL, "higher"))
        if row["policy"] == "wait":
            found.append(Target(f"{name}: share of groups lost", row["lost"], 0.0, "lower"))
        if row["policy"] == "drop" and row["k"] > 0:
            found.append(Target(f"{name}: share lost, from the model's, sigmas", row["lost_apart"], SIGMAS, "lower"))
            found.append(
                Target(f"{name}: length trained / started, sigmas", row["length_ratio_apart"], SIGMAS, "lower")
            )
        if row["policy"] == "drop" and row["lost_length_ratio_apart"] is not None:
            found.append(
                Target(f"{name}: length lost / trained, sigmas", row["lost_length_ratio_apart"], SIGMAS, "lower")
            )
    waiting = [row for row in rows if row["policy"] == "wait"]
    fresh, later = waiting[0], next(row for row in waiting if row["k"] > waiting[0]["k"])
    return [
        *found,
        Target("control: oldest trained token beyond the bound that was taken away", _beyond(control), 1, "higher"),
        Target("control: its share lost, over the model's", control["lost"] / control["model_lost"], 0.5, "lower"),
        Target(
            f"control: efficiency at age {fresh['k']} of the model's at age {later['k']}",
            fresh["efficiency"] / later["model_efficiency"],
            OF_MODEL,
            "lower",
        ),
    ]


def _apart(row: Row, setting: Pipeline) -> Row:
    """How far a row is from its model, in standard deviations of the model; None where nothing was lost by either."""
    found: Row = {}
    for name, spread in noise(setting).items():
        value, expected = row[name], row[f"model_{name}"]
        known = value is not None and expected is not None
        found[f"{name}_noise"] = spread
        found[f"{name}_apart"] = abs(value - expected) / spread if known else None
    return found


def _is(row: Row, setting: Pipeline) -> bool:
    return all(row[name] == getattr(setting, name) for name in ("policy", "k", "c", "cv"))


def _beyond(row: Row) -> int:
    beyond: int = row["max_age"] - row["k"]
    return beyond
