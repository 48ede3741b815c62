"""Starts real runs as a person does, and reads what they left: archive and metrics, never a program's own sums."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from asyncrl.buffers.archive import Archive
from asyncrl.telemetry.metrics import read_metrics, surviving_steps

RUN_LIMIT_S = 900.0
"""Of one run; ten times what the longest should take."""

WINDOW = 20
"""Steps at the end over which a run's reward is averaged: a single step's is noise."""


class RunError(RuntimeError):
    """A run that a benchmark started did not end well; holds the end of what it said."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a finished run left. Rewards are means over all scored answers; times are medians over steps, seconds."""

    steps: int
    reward_start: float  # of answers that the initial weights alone sampled
    reward_end: float  # of the last WINDOW steps
    age_max: int  # of trained tokens, versions
    age_mean: float
    tokens: int  # trained
    step_s: float
    wait_share: float  # of the time of all steps, what the learner waited for a batch
    success_before: float | None  # held-out, None if it was not evaluated
    success_after: float | None
    wall_s: float  # of the whole command, start and end of its processes included


def train(folder: Path, settings: Mapping[str, Any], *, recipe: str = "tiny-reverse") -> Evidence:
    """`asyncrl run` with a recipe and `settings` (key -> value), into the new folder `folder`.

    Raises RunError: it failed, or took longer than RUN_LIMIT_S.
    """
    arguments = [f"--set={key}={value}" for key, value in {**settings, "run.output_dir": folder}.items()]
    command = [sys.executable, "-m", "asyncrl.cli.main", "run", recipe, *arguments]
    began = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise RunError(f"{' '.join(command)} took more than {RUN_LIMIT_S:.0f} s; look into {folder}/logs") from error
    wall_s = time.monotonic() - began
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise RunError(f"{' '.join(command)} ended with code {done.returncode}:\n{said}")
    return read(folder, wall_s=wall_s)


def read(folder: Path, *, wall_s: float) -> Evidence:
    """The evidence in a run folder: rewards, ages and tokens from the archive's rows, times from metrics.jsonl."""
    archive = Archive(folder / "archive")
    table = archive.table(columns=["reward", "versions", "trained_version"]).combine_chunks()
    rewards, steps = table["reward"].to_numpy(), table["trained_version"].to_numpy()
    versions = table["versions"].chunk(0)
    # -1 where nothing was sampled; no row is empty, each has its prompt
    newest = np.maximum.reduceat(versions.flatten().to_numpy(), versions.offsets.to_numpy()[:-1])
    trained = archive.trained()
    tokens = sum(trained.tokens_by_age.values())
    records = surviving_steps(read_metrics(folder / "metrics.jsonl"))
    summary = json.loads((folder / "summary.json").read_bytes())
    return Evidence(
        steps=len(np.unique(steps)),
        reward_start=float(np.nanmean(rewards[newest == 0])),
        reward_end=float(np.nanmean(rewards[steps > steps.max() - WINDOW])),
        age_max=trained.max_age or 0,
        age_mean=sum(age * count for age, count in trained.tokens_by_age.items()) / tokens,
        tokens=tokens,
        step_s=median(record["step_s"] for record in records),
        wait_share=fmean(record["wait_s"] for record in records) / fmean(record["step_s"] for record in records),
        success_before=summary["success_before"],
        success_after=summary["success_after"],
        wall_s=wall_s,
    )
