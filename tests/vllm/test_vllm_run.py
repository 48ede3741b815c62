"""Whole processes: the tiny recipe trains over vLLM with updates in flight, and a killed one leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from asyncrl.config.loading import load_recipe
from asyncrl.runtime.models import resolve
from tests.processes import alive, within

from .server import FOR_ASYNCRL, KEY, KEY_ENV, serving
from .trees import VLLM, having

ROOT = Path(__file__).parents[2]
OVER_VLLM = ("--set", "collector.engine.type=vllm", "--max-trajectory-age", "1")


@pytest.mark.timeout(900)
def test_the_tiny_recipe_learns_over_vllm_with_updates_in_flight(
    cli: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = cli("run", "tiny-reverse", *OVER_VLLM, timeout=880)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (folder,) = (tmp_path / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 60
    assert summary["reward_last"] >= 0.85
    assert summary["age_max"] <= 1
    crossed = 0
    for part in (folder / "archive").glob("*.parquet"):
        for row in pq.read_table(part).to_pylist():
            versions = [version for version, trained in zip(row["versions"], row["loss_mask"], strict=True) if trained]
            assert versions == sorted(versions)
            assert row["trained_version"] - 1 <= versions[0]
            crossed += versions[0] != versions[-1]
    assert crossed > 0


@pytest.mark.timeout(900)
def test_the_tiny_recipe_trains_over_a_server(
    cli: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    model = resolve(load_recipe("tiny-reverse").recipe)
    with serving(model, tmp_path / "log", *FOR_ASYNCRL, slots=64) as server:
        engine = {"type": "vllm-server", "url": server.url, "api_key_env": KEY_ENV, "slots": 64}
        over = [part for key, value in engine.items() for part in ("--set", f"collector.engine.{key}={value}")]
        steps = ("--set", "run.max_steps=10", "--max-trajectory-age", "1")
        done = cli("run", "tiny-reverse", *over, *steps, timeout=500, **{KEY_ENV: KEY})
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert server.ready()  # it belongs to whoever started it
    (folder,) = (tmp_path / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["age_max"] <= 1) == (10, True)
    rows = [row for part in (folder / "archive").glob("*.parquet") for row in pq.read_table(part).to_pylist()]
    assert max(max(row["versions"]) for row in rows) >= 8


@pytest.mark.timeout(600)
def test_a_process_that_is_killed_leaves_nothing_of_vllm_behind(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Nobody watches it, as nobody watches a collector that was started by hand."""
    process = start("-m", "tests.vllm.orphan_child", str(tmp_path), cwd=ROOT)
    assert process.stdout is not None
    assert any(line == "serving\n" for line in process.stdout), "it ended"
    found = having(process.pid, VLLM)
    assert len(found) >= 2
    process.kill()
    assert within(60, lambda: not any(alive(child.pid) for child in found))
