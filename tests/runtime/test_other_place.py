"""A collector that does not see the learner's shared memory gets its weights another way, without being told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STEPS = 3
RUN_S = 120
SMALL = ("--set=learner.groups_per_step=4", f"--set=run.max_steps={STEPS}", "--set=eval.prompts=8")

ELSEWHERE = """
import os, sys
mount = 'mount -t tmpfs none /dev/shm && exec "$0" "$@"'
os.execvp("unshare", ["unshare", "--mount", "sh", "-c", mount, sys.executable, "-P", "-m", *sys.argv[1:]])
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_auto_takes_the_network_where_no_memory_is_shared_before_the_first_batch(
    start: Callable[..., Any], tmp_path: Path, server_url: str
) -> None:
    named = ("--buffer", server_url, "--set=run.name=apart", "--set=run.output_dir=run")
    learner = start("-P", "-m", "asyncrl.cli.main", "learner", *named, *SMALL, cwd=tmp_path)
    collector = start(
        *("-c", ELSEWHERE, "asyncrl.cli.main", "collector", "--buffer", server_url, "--run", "apart", "--wait", "2m"),
        cwd=tmp_path,
    )
    _, err = learner.communicate(timeout=RUN_S)
    assert learner.returncode == 0, err
    _, err = collector.communicate(timeout=60)
    assert collector.returncode == 0, err
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "event" not in record]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert set(steps[-1]["weights/sent"]) == {"collective"}
    assert f"serving (1, {STEPS}), checksum" in err
