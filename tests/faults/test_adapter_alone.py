"""Adapters alone while a collector dies, one comes late and the learner is replaced: whoever is there serves the sums
that were published."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from asyncrl.buffers.archive import Archive

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(300)]

Begin = Callable[..., "subprocess.Popen[str]"]
Cli = Callable[..., "subprocess.CompletedProcess[str]"]

RUN_S = 150
SERVING = re.compile(r": serving \((\d+), (\d+)\), checksum (\w{16})")


def served(log: Path) -> dict[tuple[int, int], str]:
    """What a collector says that it served: (lineage, version) -> checksum."""
    return {(int(lineage), int(version)): checksum for lineage, version, checksum in SERVING.findall(log.read_text())}


def test_whoever_is_there_serves_the_published_sums(
    start: Begin, cli: Cli, tmp_path: Path, server_url: str, eventually: Callable[..., bool]
) -> None:
    settings = {
        "run.name": "adapters",
        "run.output_dir": "run",
        "run.max_steps": 1000,
        "model.lora": "{r: 4, alpha: 8}",
        "model.dtype": "bfloat16",
        "learner.learning_rate": "1e-2",
        "learner.groups_per_step": 4,
        "learner.checkpoint.every_steps": 2,
        "eval.at_start": "false",
        "eval.at_end": "false",
        "weights.lora": "adapter",
        "weights.transport": "file",
        "weights.url": "weights",
        "weights.deadline_s": 60,
    }
    program = ("-P", "-m", "asyncrl.cli.main")

    def collector(name: str) -> subprocess.Popen[str]:
        return start(
            *program, "collector", "--buffer", server_url, "--run", "adapters", "--name", name, "--wait", "2m",
            cwd=tmp_path, output=(tmp_path / f"{name}.log").open("w"),
        )  # fmt: skip

    def proved(lineage: int) -> bool:
        said = cli("status", "--buffer", server_url, "--run", "adapters", "--verify-weights", timeout=120)
        row = re.search(rf"late +late/0 +{lineage}/\d+ +(\w{{16}}) +(\w{{16}}) +equal", said.stdout)
        assert row, said.stdout + said.stderr
        return said.returncode == 0 and row[1] == row[2]

    learner = start(
        *program, "learner", "--buffer", server_url, *(f"--set={key}={value}" for key, value in settings.items()),
        cwd=tmp_path, output=(tmp_path / "learner.log").open("w"),
    )  # fmt: skip
    first = collector("first")
    assert eventually(RUN_S, lambda: len(served(tmp_path / "first.log")) >= 3), (tmp_path / "learner.log").read_text()
    first.send_signal(signal.SIGKILL)
    late = collector("late")
    assert eventually(RUN_S, lambda: len(served(tmp_path / "late.log")) >= 3), (tmp_path / "late.log").read_text()
    assert proved(1)
    learner.send_signal(signal.SIGKILL)
    learner.wait(timeout=30)
    second = start(
        *program, "learner", "--buffer", server_url, "--resume", "run",
        cwd=tmp_path, output=(tmp_path / "second.log").open("w"),
    )  # fmt: skip
    assert eventually(RUN_S, lambda: max(served(tmp_path / "late.log"))[0] == 2), (tmp_path / "second.log").read_text()
    assert proved(2)
    second.send_signal(signal.SIGTERM)
    assert second.wait(timeout=90) == 143
    late.send_signal(signal.SIGTERM)
    late.wait(timeout=90)

    by_first, by_late = served(tmp_path / "first.log"), served(tmp_path / "late.log")
    assert min(by_late) > min(by_first), "it began with what was newest then"
    assert all(by_late[weights] == checksum for weights, checksum in by_first.items() if weights in by_late)
    archive = Archive(tmp_path / "run" / "archive")
    stamps = {stamp for step in archive.parts() for stamp in archive.stamps(step)}
    assert stamps <= {*by_first.items(), *by_late.items()}, "rows say what was served"

    # What lay in the folder, by the files themselves: factors in float32 and their names.
    model = tmp_path / "run" / "checkpoints"
    (saved,) = sorted(model.glob("version-*/adapter/adapter_model.safetensors"))[-1:]
    with safe_open(saved, "np") as file:
        factors = sum(int(np.prod(file.get_slice(name).get_shape())) * 4 for name in file.keys())  # noqa: SIM118
    written = [path.stat().st_size for path in (tmp_path / "weights" / "adapters").glob("*/model.safetensors")]
    assert written
    assert all(factors < size < factors + 16384 for size in written)
    whole = (saved.parent.parent / "model.safetensors").stat().st_size
    assert whole > 5 * factors
