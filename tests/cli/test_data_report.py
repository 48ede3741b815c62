"""`asyncrl run --dry-run` says what the data files came to, of every task that reads any."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROWS = [("2+2", "4"), ("2+3", "5"), ("2+3", "6"), ("2+2", "4"), ("", "4")]

RECIPE = """
task:
  type: single-turn
  data: {train: [rows.jsonl], bad_rows: skip}
"""

MIXED = """
task:
  type: mixture
  tasks:
    - {name: sums, task: {type: single-turn, data: {train: rows.jsonl, bad_rows: skip, duplicates: drop}}}
    - {name: digits, task: {type: reverse}}
"""


def test_a_dry_run_says_once_what_is_left_out_and_counts_it(called: Callable[..., Any], tmp_path: Path) -> None:
    rows = (json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in ROWS)
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "one.yaml").write_text(RECIPE)
    (tmp_path / "mixed.yaml").write_text(MIXED)
    one = called("run", "./one.yaml", "--dry-run")
    assert one.returncode == 0, one.stderr
    assert (
        "# task.data: 2 rows to train, 2 held out; left out: 1; repeated: 1; prompts with several answers: 1"
        in one.stdout
    )
    assert "train: [rows.jsonl]" in one.stdout or "- rows.jsonl" in one.stdout
    mixed = called("run", "./mixed.yaml", "--dry-run")
    assert mixed.returncode == 0, mixed.stderr
    assert "# task.tasks[0].task.data: 2 rows to train, 1 held out; left out: 1; repeated: 1" in mixed.stdout
    (tmp_path / "mixed.yaml").write_text(MIXED.replace("bad_rows: skip, ", ""))
    assert "task.tasks[0].task.data.bad_rows=skip" in called("run", "./mixed.yaml", "--dry-run").stderr


def test_a_prompt_that_is_too_long_for_the_model_is_named_before_anything_starts(
    called: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Control: a simulated engine reads no prompt, and a model that is not here has no tokenizer."""
    prompts = ["2+2", "2+3", "2" * 600, [{"role": "user", "content": "3" * 600}]]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": one, "answer": "4"}) for one in prompts))
    (tmp_path / "one.yaml").write_text(RECIPE)
    kept = called("run", "./one.yaml", "--dry-run")
    assert kept.returncode == 0, kept.stderr
    assert "# task.data: 1 rows to train, 1 held out; left out: 2\n" in kept.stdout
    assert "left out (too-long): rows.jsonl:3: the prompt has 603 tokens, but the model takes 512" in caplog.text
    ended = called(
        "run", "./one.yaml", "--dry-run", "--set", "task.data.bad_rows=error", "--set", "model.max_length=510"
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert (
        "rows.jsonl:3: the prompt has 603 tokens, but model.max_length is 510, with the answer: raise" in ended.stderr
    )
    for setting, said in (
        ("collector.engine.type=simulated", "\n"),
        ("model.path=asyncrl/none", "; tokens of prompts: not counted, the model is not on this machine\n"),
    ):
        without = called("run", "./one.yaml", "--dry-run", "--set", setting)
        assert without.returncode == 0, without.stderr
        (line,) = (line for line in without.stdout.splitlines(keepends=True) if line.startswith("# task.data: "))
        assert line.startswith("# task.data: 3 rows to train, 1 held out")
        assert line.endswith(f"1 held out{said}")


def test_a_bad_row_and_a_leak_end_it_with_the_key_that_decides(called: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,answer\na,1\nb,\n")
    (tmp_path / "test.csv").write_text("prompt,answer\na,1\n")
    (tmp_path / "one.yaml").write_text("task: {type: single-turn, data: {train: rows.csv, heldout: test.csv}}\n")
    bad = called("run", "./one.yaml", "--dry-run")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert "rows.csv:2: the answer (column 'answer') is empty" in bad.stderr
    assert bad.stderr.rstrip().endswith("task.data.bad_rows=skip")
    leak = called("run", "./one.yaml", "--dry-run", "--set", "task.data={bad_rows: skip, leaks: error}")
    assert leak.returncode == 2
    assert "also occur in rows.csv: 1, as rows.csv:1; remove them there, or have it done: task.data.leaks=drop" in (
        leak.stderr
    )
