"""`benchmarks/gpu_learner.py` where there is no GPU, and the numbers that it would give where there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.benchmarks.gpu_learner import GPU_ONLY, QUICK, SHAPES, WAYS, peak_of, useful
from asyncrl.benchmarks.learner_flops import by_formula, pairs_of
from asyncrl.learners.shapes import Shapes, of_config

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_learner.py"
LIMIT_S = 200.0


def ran(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--json", str(folder / "gpu.json"), *arguments],
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_without_a_gpu_it_says_so_in_one_line_and_quick_tries_it_on_the_cpu(tmp_path: Path) -> None:
    refused = ran(tmp_path)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    assert refused.stderr.startswith("needs a GPU that torch ")
    assert not list(tmp_path.iterdir())

    tried = ran(tmp_path, "--quick")
    assert tried.returncode == 0, tried.stderr
    rows = json.loads((tmp_path / "gpu.json").read_bytes())["rows"]
    assert [row["way"] for row in rows] == [way for way in WAYS if way != GPU_ONLY]
    for row in rows:
        assert row["changed"] == row["steps"]
        assert min(row["tokens_per_s"], row["tflops"]) > 0
        assert not {"mfu", "peak_gib"} & row.keys()


def test_the_models_have_as_many_parameters_as_their_names_say() -> None:
    found = {}
    for name, shape in {**SHAPES, "quick": QUICK}.items():
        shapes = of_config(dict(shape.config))
        assert isinstance(shapes, Shapes), shapes
        found[name] = shapes.parameters
    assert found == {"0.5b": 494_032_768, "1b": 1_235_814_400, "quick": 115_776}


def test_what_is_useful_is_each_token_once_and_a_shared_prompt_too() -> None:
    config: Any = SimpleNamespace(**SHAPES["0.5b"].config)
    alone = useful(config, [[5], [9]], 32)
    assert alone == by_formula(config, computed=64 + 14, pairs=pairs_of([37, 41]), predicted=14)
    # Two answers that share their prompt: the prompt once, and one hidden state for both first tokens.
    shared = by_formula(config, computed=32 + 14, pairs=pairs_of([32]) + pairs_of([37, 41], [5, 9]), predicted=13)
    assert useful(config, [[5, 9]], 32) == shared < alone


def test_a_gpu_has_the_peak_of_its_data_sheet_or_none() -> None:
    known = ["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA L4"]
    assert [peak_of(name) for name in known] == [989e12, 756e12, 989e12, 312e12, 121e12]
    assert peak_of("NVIDIA GeForce RTX 4090") == 165e12
    assert [peak_of(name) for name in ("NVIDIA L40S", "NVIDIA GeForce RTX 4090 D", "NVIDIA B200")] == [None] * 3
