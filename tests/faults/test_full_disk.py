"""The learner's disk is full: a step that cannot be archived is not committed, and is made again once there is room."""

from __future__ import annotations

import re
import resource
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from asyncrl.telemetry.metrics import read_metrics

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(400)]

RUN_S = 150.0  # the built-in model is made once, torch is imported twice on two busy cores


def learner_of(run: subprocess.Popen[str]) -> psutil.Process | None:
    return next((p for p in psutil.Process(run.pid).children(recursive=True) if "learner" in p.cmdline()), None)


def test_a_step_that_cannot_be_archived_is_not_committed(
    tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    folder = tmp_path / "out"
    settings = ("run.output_dir=out", "run.max_steps=400", "eval.at_start=false", "eval.at_end=false")
    run = spawn("run", "run", *(text for setting in settings for text in ("--set", setting)))
    deadline = time.monotonic() + RUN_S
    while len(parts := sorted((folder / "archive").glob("step-*.parquet"))) < 3:
        assert time.monotonic() < deadline, (tmp_path / "run.log").read_text()
        assert run.poll() is None, (tmp_path / "run.log").read_text()
        time.sleep(0.02)
    learner = learner_of(run)
    assert learner is not None
    most = parts[0].stat().st_size // 2
    # As on a full disk, writing fails with an error; here with EFBIG and for what exceeds half a part of the archive.
    _, hard = resource.prlimit(learner.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(learner.pid, resource.RLIMIT_FSIZE, (most, hard))

    assert run.wait(timeout=RUN_S) == 1
    said = (tmp_path / "run.log").read_text()
    assert re.search(r"Error: .*File too large", said), said
    assert "Traceback" not in said

    audited = spawn("full", "buffer", "audit", "out")
    assert audited.wait(timeout=60) == 0, (tmp_path / "full.log").read_text()
    full = (tmp_path / "full.log").read_text()
    committed = int(re.search(r"version (\d+)", full)[1])  # type: ignore[index]
    assert f"archive: {committed} steps" in full

    resumed = spawn("resumed", "run", "--resume", "out", "--set", f"run.max_steps={committed + 3}")
    assert resumed.wait(timeout=RUN_S) == 0, (tmp_path / "resumed.log").read_text()
    audited = spawn("audit", "buffer", "audit", "out")
    assert audited.wait(timeout=60) == 0, (tmp_path / "audit.log").read_text()
    steps = [record["step"] for record in read_metrics(folder / "metrics.jsonl") if "event" not in record]
    assert steps[-1] == committed + 3
