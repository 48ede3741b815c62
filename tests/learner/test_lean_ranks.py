"""Activation checkpointing, offloading and memory that runs out, under FSDP2: real processes, over Gloo."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.recipe import Learner, Recipe
from asyncrl.learners.parallel import ALONE
from asyncrl.learners.shrinking import FILE
from asyncrl.learners.trainer import Trainer
from asyncrl.schema import encode

LIMIT_S = 240.0
SCRIPT = str(Path(__file__).with_name("lean_ranks.py"))


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory,
    model_path: Path,
    make_row: Callable[..., Any],
    make_group: Callable[..., Any],
) -> Path:
    folder = tmp_path_factory.mktemp("lean")
    shutil.copytree(model_path, folder / "model")
    (folder / "groups").mkdir()
    generator = np.random.default_rng(1)
    for ticket in range(4):
        rows = []
        for member in range(4):
            n = int(generator.integers(2, 12))
            ids, logprobs = generator.integers(0, 24, n).tolist(), generator.normal(-3, 0.5, n).tolist()
            rows.append(make_row([1, 2, 3], ids, logprobs, reward=float(member % 2), member=member))
        (folder / "groups" / f"{ticket}.arrow").write_bytes(encode(make_group(rows, ticket=ticket)))
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path, lean_ranks: ModuleType) -> dict[str, dict[str, torch.Tensor]]:
    return dict(lean_ranks.outcomes(ALONE, folder))


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, atol=1e-5, rtol=1e-5), name


def begin(folder: Path, size: int) -> list[subprocess.Popen[str]]:
    for name in ("meeting", "run"):
        (folder / f"{name}-{size}").mkdir()
    command = [sys.executable, SCRIPT]
    return [
        subprocess.Popen([*command, str(rank), str(size), str(folder)], stderr=subprocess.PIPE, text=True)
        for rank in range(size)
    ]


def test_alone_the_keys_change_no_bit_and_a_cpu_is_told_that_it_has_nothing_to_offload(
    alone: dict[str, dict[str, torch.Tensor]], model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, found in alone.items():
        same = alone["adapted" if "adapted" in name else "plain"]
        assert all(torch.equal(found[key], tensor) for key, tensor in same.items())
    Trainer.load(Recipe(learner=Learner(cpu_offload=True)), model_path, None)
    assert "learner.cpu_offload changes nothing: the learner computes on the CPU" in caplog.text


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [1, 2])
def test_ranks_take_the_step_of_one_and_one_that_runs_out_is_lost_but_says_what_is_next(
    folder: Path, alone: dict[str, dict[str, torch.Tensor]], size: int
) -> None:
    """A group of one is what one rank on a GPU has for its weights to stay in host memory."""
    *others, last = begin(folder, size)
    try:
        _, said = last.communicate(timeout=LIMIT_S)
    finally:
        for other in others:  # waits for the one that is lost; in a run, whoever watches the ranks ends it
            other.kill()
            other.communicate(timeout=10)
    for name, found in torch.load(folder / f"outcomes-{size}.pt", weights_only=True).items():
        close(found, alone[name])
    assert last.returncode == 1
    assert "RankLost: a micro-batch of up to" in said
    assert "learner.max_tokens_per_microbatch is 12, not 25" in said
    run_dir = folder / f"run-{size}"
    assert json.loads((run_dir / FILE).read_text()) == {"configured": 25, "tokens": 12}
    again = Recipe(learner=Learner(max_tokens_per_microbatch=25))
    assert Trainer.load(again, folder / "model", None, run_dir=run_dir).budget.tokens == 12
