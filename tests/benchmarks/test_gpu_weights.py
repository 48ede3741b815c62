"""`benchmarks/gpu_weights.py` where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_weights.py"


def test_without_a_gpu_it_says_so_in_one_line_and_ends_with_2(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", str(tmp_path / "gpu.json")],
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert ran.returncode == 2, ran.stderr
    assert ran.stderr.count("\n") == 1
    assert ran.stderr.startswith("no GPU that torch ")
    assert not list(tmp_path.iterdir())
