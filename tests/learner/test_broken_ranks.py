"""A rank of which nothing can be trained steps with the others, and the step is the one that a single rank takes. Real
processes, FSDP2 over Gloo."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import numpy as np
import pytest
import torch

from asyncrl.config.objective import Aggregation, Preset
from asyncrl.learners.parallel import ALONE
from asyncrl.schema import encode
from asyncrl.staleness import Weights

LIMIT_S = 300.0
CASES = ("non-finite", "impossible", "unscored", "too old", "masked for its age", "empty", "all unscored")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model_path: Path, make_row: Any, make_group: Any) -> Path:
    folder = tmp_path_factory.mktemp("broken")
    shutil.copytree(model_path, folder / "model")
    (folder / "meeting").mkdir()
    for case in ("sound", *CASES):
        generator = np.random.default_rng(1)
        (folder / "groups" / case).mkdir(parents=True)
        for ticket in range(5):
            broken = case == "all unscored" or (case != "sound" and ticket >= 3)
            rows = []
            for member in range(3):
                n = int(generator.integers(1, 12))
                completion, logprobs = generator.integers(0, 23, n).tolist(), generator.normal(-3, 0.5, n).tolist()
                reward = float(generator.integers(0, 3))
                if broken and case == "non-finite":
                    logprobs = [(math.nan, -math.inf, math.inf)[t % 3] for t in range(n)]
                if broken and case == "impossible" and member < 2:
                    completion = [23] * n if member else [*completion[:-1], 23]
                if broken and case == "empty":
                    completion, logprobs = [], []
                old = broken and case in ("too old", "masked for its age")
                rows.append(
                    make_row(
                        [1, 2, 3],
                        completion,
                        logprobs,
                        reward=math.nan if broken and "unscored" in case else reward,
                        weights=Weights(1, 0 if old else 1 + ticket % 2),
                        member=member,
                    )
                )
            (folder / "groups" / case / f"{ticket}.arrow").write_bytes(encode(make_group(rows, ticket=ticket)))
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path, broken_ranks: ModuleType) -> dict[str, Any]:
    assert broken_ranks.CASES == CASES
    return dict(broken_ranks.outcome(ALONE, folder))


@pytest.fixture(scope="module")
def together(folder: Path) -> dict[str, Any]:
    """The outcome of two processes."""
    script = str(Path(__file__).with_name("broken_ranks.py"))
    processes = [subprocess.Popen([sys.executable, script, str(rank), "2", str(folder)]) for rank in range(2)]
    try:
        assert [process.wait(LIMIT_S) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
    found: dict[str, Any] = torch.load(folder / "outcome.pt", weights_only=False)
    return found


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    assert found.keys() == expected.keys()
    return all(torch.allclose(found[name], tensor, atol=1e-5, rtol=1e-5) for name, tensor in expected.items())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_a_rank_that_has_nothing_to_train_takes_the_others_step(
    together: dict[str, Any], alone: dict[str, Any], case: str, aggregation: Aggregation
) -> None:
    found, expected = together["steps"][case, aggregation], alone["steps"][case, aggregation]
    assert np.isfinite(found["account"]).all()
    assert (found["account"][3] > 0) == (case == "impossible")
    np.testing.assert_allclose(found["account"], expected["account"], atol=1e-5, rtol=1e-4)
    assert close(found["after"], expected["after"])
    if case == "all unscored":
        assert found["skipped"].startswith("no token to train")
        assert all(torch.equal(found["after"][name], tensor) for name, tensor in found["before"].items())
    else:
        assert found["skipped"] == ""
        assert not close(found["after"], found["before"])


@pytest.mark.parametrize("preset", get_args(Preset))
def test_two_ranks_have_the_gradient_of_one(together: dict[str, Any], alone: dict[str, Any], preset: Preset) -> None:
    found, expected = together["gradients"][preset], alone["gradients"][preset]
    assert max(float(p.abs().max()) for p in expected.values()) > 1e-3
    assert close(found, expected)
