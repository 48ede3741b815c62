"""What several ranks publish is what one would, and nobody ever holds more than two buckets of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.learners.gathering import buckets, merged, part_sizes
from asyncrl.weights.manifest import Manifest, Pieces

LIMIT_S = 120.0


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=6), st.integers(1, 12))
def test_buckets_hold_every_element_once_in_order_and_are_full(sizes: list[list[int]], limit: int) -> None:
    plan = list(buckets(sizes, limit))
    found = [(s.parameter, s.rank, n) for bucket in plan for s in bucket for n in range(s.start, s.stop)]
    assert found == [(p, r, n) for p, parts in enumerate(sizes) for r, size in enumerate(parts) for n in range(size)]
    lengths = [sum(stretch.length for stretch in bucket) for bucket in plan]
    assert lengths[:-1] == [limit] * (len(plan) - 1)
    assert all(0 < length <= limit for length in lengths[-1:])


@given(st.lists(st.integers(0, 6), min_size=1, max_size=3), st.integers(1, 5))
def test_parts_are_those_of_torch(shape: list[int], ranks: int) -> None:
    parts = [chunk.numel() for chunk in torch.chunk(torch.empty(shape), ranks)]
    assert part_sizes(shape, ranks) == parts + [0] * (ranks - len(parts))


def test_what_is_not_trained_is_published_as_it_is_in_its_place() -> None:
    served = [("a", torch.ones(2)), ("b", torch.ones(2)), ("n", torch.tensor([3]))]
    pieces = Pieces(torch.bfloat16, (2,), [torch.zeros(2, dtype=torch.bfloat16)])
    (a, one), (b, two), (n, three) = merged(served, iter([("b", pieces)]), "bfloat16")
    assert (a, b, n) == ("a", "b", "n")
    assert two is pieces
    assert [tensor.dtype for tensor in (one, three)] == [torch.bfloat16, torch.int64]


def test_what_is_trained_and_not_served_is_an_error() -> None:
    stray = Pieces(torch.float32, (1,), [torch.zeros(1)])
    with pytest.raises(RuntimeError, match="b is trained, but not among what is served"):
        list(merged([("a", torch.ones(1))], iter([("b", stray)]), "float32"))


@pytest.fixture
def folder(tmp_path: Path, model_path: Path) -> Path:
    shutil.copytree(model_path, tmp_path / "model")
    (tmp_path / "meeting").mkdir()
    return tmp_path


def start(folder: Path, size: int) -> list[subprocess.Popen[str]]:
    script = str(Path(__file__).with_name("gathered.py"))
    return [
        subprocess.Popen([sys.executable, script, str(rank), str(size), str(folder)], stderr=subprocess.PIPE, text=True)
        for rank in range(size)
    ]


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """(exit code, stderr) of each."""
    try:
        said = [process.communicate(timeout=LIMIT_S)[1] for process in processes]
        return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.wait(10)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_publish_the_bits_that_one_would_in_two_buckets_of_memory(
    folder: Path, gathered: ModuleType, size: int
) -> None:
    outcomes = ended(start(folder, size))
    assert [code for code, _ in outcomes] == [0] * size, outcomes
    expected, (small, large) = gathered.alone(folder), gathered.SIZES
    assert max(spec.nbytes for spec in expected.tensors) > small
    assert msgspec.json.decode((folder / "manifests.json").read_bytes(), type=list[Manifest]) == [expected, expected]
    for rank in range(size):
        held, held_in_one = msgspec.json.decode((folder / f"peaks-{rank}").read_bytes(), type=list[int])
        assert 0 < held <= 2 * small
        assert held_in_one > 8 * small  # the measure finds what buckets avoid
    assert large > expected.nbytes
