"""A learner that is killed, and one that goes on: the same collector, over transports of each kind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(300)]

Begin = Callable[..., "subprocess.Popen[str]"]

STEPS = 12
RUN_S = 150
SERVING = re.compile(r": serving \((\d+), (\d+)\), checksum")


def served(log: Path) -> list[tuple[int, int]]:
    """What a collector says that it served, in order: (lineage, version)."""
    return [(int(lineage), int(version)) for lineage, version in SERVING.findall(log.read_text())]


@pytest.mark.parametrize("transport", ["shm", "collective", "delta"])
def test_collectors_take_the_weights_of_the_learner_that_comes_after_a_killed_one(
    start: Begin, tmp_path: Path, server_url: str, transport: str, eventually: Callable[..., bool]
) -> None:
    run = f"resumed-{transport}"
    settings = {
        "run.name": run,
        "run.output_dir": "run",
        "run.max_steps": STEPS,
        "learner.groups_per_step": 4,
        "learner.checkpoint.every_steps": 2,
        "eval.at_start": "false",
        "eval.at_end": "false",
        "weights.transport": transport,
        "weights.deadline_s": 20,
        **({"weights.url": "weights"} if transport == "delta" else {}),
    }
    program = ("-P", "-m", "asyncrl.cli.main")
    log = tmp_path / "collector.log"
    metrics = tmp_path / "run" / "metrics.jsonl"

    def trained() -> int:
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return max((json.loads(line).get("step", 0) for line in lines), default=0)

    with log.open("w") as said:
        learner = start(
            *program, "learner", "--buffer", server_url, *(f"--set={key}={value}" for key, value in settings.items()),
            cwd=tmp_path, output=(tmp_path / "first.log").open("w"),
        )  # fmt: skip
        collector = start(
            *program, "collector", "--buffer", server_url, "--run", run, "--wait", "2m", cwd=tmp_path, output=said
        )
        assert eventually(RUN_S, lambda: trained() >= 4)
        learner.send_signal(signal.SIGKILL)
        learner.wait(timeout=30)
        second = start(*program, "learner", "--buffer", server_url, "--resume", "run", cwd=tmp_path)
        _, err = second.communicate(timeout=RUN_S)
        assert second.returncode == 0, err
        assert collector.wait(timeout=60) == 0
    found = served(log)
    assert {lineage for lineage, _ in found} == {1, 2}
    assert found == sorted(found), "versions skip, they never go back within a lineage, nor does the lineage"
    assert trained() == STEPS
