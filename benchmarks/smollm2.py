"""`smollm2`: a real model on two cores. Does SmolLM2-135M-Instruct learn `uppercase` through an adapter, and how fast?

Held-out words before and after, the same ones with the same seeds: the difference is paired, word by word, with its
95 % interval. Words of the evaluation are never trained.

Control: one step with a learning rate of 1e-12, everything else the same. A difference there would come from the
measurement.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path

from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.benchmarks.runs import train
from asyncrl.collectors.evaluation.compared import comparison
from asyncrl.config.evaluation import REWARD
from asyncrl.learners.cache import BuiltinModelError
from asyncrl.learners.evaluation import stored_evaluations
from asyncrl.learners.smollm2 import ensure_smollm2

RECIPE = "smollm2-uppercase"
AFTER = 0.5
MINUTES = 10.0
CONTROL = {"learner.learning_rate": 1e-12, "run.max_steps": 1, "eval.prompts": 64}


def measure(*, quick: bool, say: Say) -> Measured:
    """Rows: the run, and the control. `quick` changes nothing: it takes as long as it takes to learn."""
    try:
        ensure_smollm2()  # made once per machine and cached: not part of what a run takes
    except BuiltinModelError as error:
        say(str(error))
        return Measured(rows=[], targets=targets(None, None))
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as parent:
        rows = []
        for kind, settings in (("run", {}), ("control", CONTROL)):
            name = f"bench-smollm2-{kind}"
            found = train(Path(parent) / name, {"run.name": name, **settings}, recipe=RECIPE)
            row = {"kind": kind, **paired(Path(parent) / name), "minutes": found.wall_s / 60, **asdict(found)}
            rows.append(row)
            say(
                f"{kind}: success {row['before']:.3f} -> {row['after']:.3f} on {row['n']} held-out words, difference "
                f"{row['difference']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}], {row['minutes']:.1f} minutes"
            )
    return Measured(rows=rows, targets=targets(*rows))


def paired(folder: Path) -> Row:
    """First and last evaluation of a run folder: means over the words of both, and their difference with its 95 %
    interval."""
    first, *_, last = stored_evaluations(folder / "eval").values()
    difference = comparison(last["answers"], first["answers"], ks=(), pass_above=0.0, seed=0)["metrics"][REWARD]
    return {
        "before": first["success"],
        "after": last["success"],
        "n": difference["prompts"],
        "difference": difference["value"],
        "low": difference["low"],
        "high": difference["high"],
    }


def targets(run: Row | None, control: Row | None) -> list[Target]:
    """None: not measured."""

    def of(row: Row | None, name: str) -> float | None:
        return None if row is None else row[name]

    return [
        Target("held-out success after", of(run, "after"), AFTER, "higher"),
        Target("difference, lower end of the 95 % interval", of(run, "low"), 1e-9, "higher"),
        Target("held-out words", of(run, "n"), 200, "higher"),
        Target("minutes", of(run, "minutes"), MINUTES, "lower"),
        Target("control: success after", of(control, "after"), AFTER, "lower"),
        Target("control: lower end of the interval", of(control, "low"), 0.0, "lower"),
    ]
