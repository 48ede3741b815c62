"""How long training stands for a checkpoint: real runs, which write one every other step, beside training and not.

A random model of 19 million parameters, whose checkpoint is 230 MB, under `asyncrl run` with a real engine. *Stall*:
from the end of a step, when its record is written, to the beginning of the next one, by the clock of metrics.jsonl; the
learner's own number, `checkpoint/stall_s`, stands beside it. It is compared with a step, without its waiting for a
batch. Medians; the checkpoint at the end of a run, which every run waits for, is not counted.

Steps beside which a checkpoint is written are slower where cores are few: `beside_s` against `step_s`.

Control: `learner.checkpoint.async_save: false`, which must miss the target.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.benchmarks.memory import MEDIUM, SETTINGS, random_llama
from asyncrl.benchmarks.runs import train
from asyncrl.telemetry.metrics import read_metrics, surviving_steps

SHARE = 0.05

EVERY = 2  # steps; each other step has a write beside it
STEPS, QUICK_STEPS = 9, 3
QUICK = {**MEDIUM, "num_hidden_layers": 6}  # half of a step's work, and half of a checkpoint's bytes
WARM = 1  # the first step, in which memory is given out


@dataclass(frozen=True, slots=True)
class Found:
    """Seconds, medians. step: a step's own work. beside: of the steps that began with a write under way. stall: see
    above; own: by the learner's own account. save: a write, from the snapshot on."""

    checkpoints: int
    step: float
    beside: float
    stall: float
    own: float
    save: float


def measure(*, quick: bool, say: Say) -> Measured:
    """A row for checkpoints written beside training, and one for those that training waits for."""
    return compare(QUICK, steps=QUICK_STEPS, say=say) if quick else compare(MEDIUM, steps=STEPS, say=say)


def compare(config: dict[str, Any], *, steps: int, say: Say) -> Measured:
    """Two runs of a random Llama of this configuration. Raises RunError."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        folder = Path(name)
        random_llama(folder / "model", config)
        for beside in (True, False):
            settings = {
                **SETTINGS,
                "model.path": folder / "model",
                "run.name": f"bench-checkpoint-{beside}".lower(),
                "run.max_steps": steps,
                "learner.checkpoint.every_steps": EVERY,
                "learner.checkpoint.async_save": beside,
                "learner.checkpoint.keep_last": 1,
            }
            run = folder / str(beside)
            train(run, settings)
            rows.append(_row(beside, steps, read(run), _bytes(run), say))
    return Measured(rows, targets(*rows))


def targets(beside: Row, waited: Row) -> list[Target]:
    return [
        Target("a checkpoint beside training: stall over a step", beside["stall_share"], SHARE, "lower"),
        Target("control: stall over a step where training waits", waited["stall_share"], SHARE, "higher"),
    ]


def read(run: Path) -> Found:
    """From the records of a finished run."""
    records = read_metrics(run / "metrics.jsonl")
    written = [record for record in records if record.get("event") == "checkpoint"]
    return found(surviving_steps(records), written, every=EVERY)


def found(steps: Sequence[Mapping[str, Any]], written: Sequence[Mapping[str, Any]], *, every: int) -> Found:
    """steps: their records, of one lineage in order. written: events of checkpoints."""
    work = {record["step"]: record["step_s"] - record["wait_s"] for record in steps if record["step"] > WARM}
    after = {step + 1 for step in range(every, steps[-1]["step"], every)}  # the steps that follow a checkpoint
    gaps = [
        later["time"] - later["step_s"] - earlier["time"]
        for earlier, later in pairwise(steps)
        if later["step"] in after
    ]
    return Found(
        checkpoints=len(gaps),
        step=median(seconds for step, seconds in work.items() if step not in after),
        beside=median(seconds for step, seconds in work.items() if step in after),
        stall=median(gaps),
        own=median(record["checkpoint/stall_s"] for record in steps if record["step"] in after),
        save=median(event["checkpoint/save_s"] for event in written),
    )


def _bytes(run: Path) -> int:
    """Of the newest checkpoint."""
    newest = max((run / "checkpoints").glob("version-*"))
    return sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())


def _row(beside: bool, steps: int, of: Found, size: int, say: Say) -> Row:
    row: Row = {
        "part": "checkpoint",
        "way": "beside training" if beside else "training waits",
        "steps": steps,
        "checkpoints": of.checkpoints,
        "mb": size / 1e6,
        "step_s": of.step,
        "beside_s": of.beside,
        "stall_s": of.stall,
        "own_stall_s": of.own,
        "save_s": of.save,
        "stall_share": of.stall / of.step,
    }
    say(
        f"checkpoint of {row['mb']:.0f} MB, {row['way']}: {1e3 * of.stall:.0f} ms stall, {of.step:.1f} s a step, "
        f"{of.beside:.1f} s beside a write"
    )
    return row
