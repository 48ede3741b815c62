"""The example of agents trains: recipe, checks, processes, endpoint, record and evaluation together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_agent_trains_and_is_evaluated(start: Callable, cli: Callable, tmp_path: Path) -> None:
    for path in (ROOT / "examples" / "agent").iterdir():
        shutil.copy(path, tmp_path)
    process = start("make_data.py", cwd=tmp_path)
    assert process.wait(60) == 0
    small = ["--set", "run.max_steps=3", "--set", "learner.groups_per_step=4", "--set", "eval.prompts=8"]
    done = cli("run", "./recipe.yaml", *small, timeout=300)
    assert done.returncode == 0, done.stderr
    tables = [pq.read_table(path) for path in sorted((tmp_path / "agent" / "archive").glob("step-*.parquet"))]
    rows = [row for table in tables for row in table.to_pylist()]
    assert len({(row["ticket"], row["member"]) for row in rows}) == 3 * 4 * 8
    assert {len(row["turn_offsets"]) for row in rows} == {2}  # two calls, one row
    assert {name for row in rows for name, _ in row["reward_parts"]} == {"right", "back"}
    assert all(json.loads(row["info"])["calls"] == 2 for row in rows)
    found = cli("eval", "agent", "--prompts", "8", "--n", "1", "--json", "eval.json", timeout=200)
    assert found.returncode == 0, found.stderr
    assert "all scored" in found.stdout
