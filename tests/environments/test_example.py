"""`examples/tools` as it stands: imitation, then practice, in a run with all its processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from tests.processes import Start

EXAMPLE = Path(__file__).parents[2] / "examples" / "tools"


def succeeds(begin: Start, *arguments: str, limit_s: float) -> str:
    process = begin(*arguments)
    out, err = process.communicate(timeout=limit_s)
    assert process.returncode == 0, err
    return out


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_learns_to_look_before_it_answers(begin: Start, tmp_path: Path) -> None:
    for file in EXAMPLE.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    subprocess.run([sys.executable, "make_data.py"], cwd=tmp_path, check=True, timeout=30, env={**os.environ})
    succeeds(begin, "sft", "./sft.yaml", limit_s=250)
    # A third of its steps: what they change is far above what 300 held-out rows are off by.
    succeeds(begin, "run", "./rl.yaml", "--set", "run.max_steps=14", limit_s=300)
    result = json.loads((tmp_path / "boxes-rl" / "summary.json").read_text())
    assert 0.15 < result["success_before"] < 0.5
    assert result["success_after"] > result["success_before"] + 0.1
    parts = (tmp_path / "boxes-rl" / "archive").glob("*.parquet")
    rows = [row for part in parts for row in parquet.read_table(part).to_pylist()]
    assert len(rows) >= 14 * 16 * 8
    infos = [json.loads(row["info"]) for row in rows]
    assert {info["turns"] for info in infos} >= {1, 2}
    assert all(len(row["turn_offsets"]) == info["turns"] for row, info in zip(rows, infos, strict=True))
    assert not any(row["failure"] for row in rows)
