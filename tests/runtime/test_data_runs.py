"""A run on few rows, in real processes: it goes on into the next epochs, without the row that fits into no model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.buffers.archive import Archive

LIMIT_S = 240.0

RECIPE = """
extends: tiny-reverse
run: {name: few, max_steps: 8}
model: {max_length: 64}
task:
  type: single-turn
  data: {train: rows.parquet, heldout: test.csv, bad_rows: skip, leaks: drop}
collector: {group_size: 2}
learner: {groups_per_step: 2}
eval: {at_start: false, at_end: true, prompts: 2}
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_goes_on_when_all_rows_were_asked_and_says_what_its_files_came_to(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"reverse {n}", "answer": str(n)[::-1]} for n in (*range(120, 127), 555)]
    rows += [{"prompt": "reverse " + "1" * 400, "answer": "1" * 400}, {"prompt": "reverse 9", "answer": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "test.csv").write_text("prompt,answer\nreverse 555,555\nreverse 556,655\n")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    run = start("-m", "asyncrl.cli.main", "run", "recipe.yaml", cwd=tmp_path)
    said, errors = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0, said + errors
    assert "task.data: 7 rows to train, 2 held out; left out: 2; held-out prompts also in train: 1" in said
    (folder,) = (tmp_path / "runs").iterdir()
    found = json.loads((folder / "data.json").read_bytes())["task.data"]
    assert {reason: one["rows"] for reason, one in found["read"]["train"]["left_out"].items()} == {
        "null": 1,
        "too-long": 1,
    }
    table = Archive(folder / "archive").table(columns=["ticket", "row_id"]).to_pylist()
    asked = Counter(row_id for _, row_id in {(row["ticket"], row["row_id"]) for row in table})
    assert sum(asked.values()) == 16
    assert asked.keys() <= {f"rows.parquet:{n}" for n in range(1, 8)}
    assert max(asked.values()) <= 3
